"""Steps of a model whose layers are split over processes: the rows go through the stages in micro-batches.

Stages hand hidden states on by plain sends. `torch.distributed.pipelining` has schedules of one forward (and backward)
pass over micro-batches of equal shape that it splits itself; it knows no state of rows, which a cache is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ..cache.step import StepContext
from ..errors import InputError
from .module import ModuleRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..generation.sampler import Sampler
    from ..models.cache_factory import ExportableCache
    from ..models.stages import Stage
    from ..program.spec import ProgramSpec
    from .compiling import CompileOptions


class StageForward:
    """A stage's part of a model's forward: its layers, over what the stage before gives.

    Args:
        model: Loaded by transformers, whose own forward sends every call's logits to all before the next may begin.
        stage: Of it.

    Attributes:
        sends: Under way.
    """

    def __init__(self, model: PreTrainedModel, stage: Stage) -> None:
        self._model, self._stage = model, stage
        self.sends: list[Any] = []
        self.dtype, self._hidden = model.dtype, model.config.get_text_config(decoder=True).hidden_size
        # Programs ask which arguments it takes.
        functools.update_wrapper(self, model.forward)

    def __call__(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Logits of the last stage; of others in their place what they send on."""
        ranks, tokens = self._stage.ranks, {"input_ids": input_ids}
        if not self._stage.is_first:
            given = torch.empty(*input_ids.shape, self._hidden, dtype=self.dtype, device=input_ids.device)
            dist.recv(given, group=ranks.group, group_src=ranks.rank - 1)
            tokens = {"inputs_embeds": given}
        if self._stage.is_last:
            return type(self._model).forward(self._model, **tokens, **options)
        options.pop("logits_to_keep", None)
        base = getattr(self._model, self._model.base_model_prefix)
        hidden = base(**tokens, **options).last_hidden_state.contiguous()
        self.sends.append(dist.isend(hidden, group=ranks.group, group_dst=ranks.rank + 1))
        return SimpleNamespace(logits=hidden)

    def wait(self) -> None:
        """Until what was sent is on its way."""
        for send in self.sends:
            send.wait()
        self.sends.clear()


def _put_back(model: PreTrainedModel, theirs: Callable[..., Any]) -> None:
    model.forward = theirs  # type: ignore[method-assign]


class StagedRunner(ModuleRunner):
    """A stage's part of each step: every process runs the same calls, and all get the last one's logits.

    While one stage computes a micro-batch, the one before it computes the next: with as many micro-batches as stages,
    and rows for them, of `2 * stages - 1` turns each stage works in `stages`.

    Args:
        model, cache, spec, options: See `ModuleRunner`; nothing is compiled.

    Raises:
        InputError: If it is to be compiled, or to take more than text.
    """

    def __init__(
        self, model: PreTrainedModel, cache: ExportableCache, spec: ProgramSpec, options: CompileOptions
    ) -> None:
        if options.compile:
            raise InputError("a model whose layers are split over stages runs as it is; leave out compile")
        if spec.modalities:
            raise InputError("a model whose layers are split over stages takes text alone; leave out modalities")
        assert cache.stage is not None
        super().__init__(model, cache, spec, options)
        self.stage: Stage = cache.stage
        self._layout = cache
        self._put_back = weakref.finalize(self, _put_back, model, model.forward)
        self._put_back.atexit = False
        self._forward = StageForward(model, self.stage)
        model.forward = self._forward  # type: ignore[method-assign]

    def close(self) -> None:
        self._put_back()
        super().close()

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not self.is_open:
            return super().run(method, *inputs)
        with self.stage.ranks.watched():
            return self._whole_step(method, inputs)

    @torch.no_grad()
    def run_and_choose(self, method: str, chooser: Sampler, *inputs: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Decode steps, each of which feeds what the one before has chosen: int64 [batch, steps]."""
        tokens, position = inputs
        chosen = []
        for _ in range(steps):
            logits = self.run(method, tokens, position)
            chosen.append(chooser.choose(logits))  # type: ignore[arg-type]
            tokens, position = chosen[-1][:, None], position + 1
        return torch.stack(chosen, dim=1)

    def _whole_step(self, method: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        module, step = self.modules[method], self.methods[method]
        rows, given = inputs[0].shape[0], []
        for part in torch.arange(rows).tensor_split(min(rows, self.stage.ranks.size)):
            first, count = int(part[0]), len(part)
            cut = [tensor.narrow(0, first, count) for tensor in inputs]
            tensors = {name: tensor.narrow(0, first, count) for name, tensor in self.state.items()}
            cache = self._layout.with_state(tensors, StepContext(cut[1], step.kv_read_len))
            named = dict(zip(step.input_names, cut, strict=True))
            given.append(module.run(cache, **named))  # type: ignore[operator]
        self._forward.wait()
        return self._of_last(torch.cat(given) if self.stage.is_last else None)

    def _of_last(self, logits: torch.Tensor | None) -> torch.Tensor:
        """The last stage's logits on all, which are told their shape first."""
        ranks, dims = self.stage.ranks, 3
        shape = torch.zeros(1 + dims, dtype=torch.int64, device=ranks.device)
        if logits is not None:
            shape[: 1 + logits.dim()] = torch.tensor([logits.dim(), *logits.shape])
        dist.broadcast(shape, group=ranks.group, group_src=ranks.size - 1)
        number, *sizes = shape.tolist()
        if logits is None:
            logits = torch.empty(sizes[:number], dtype=self._forward.dtype, device=ranks.device)
        logits = logits.contiguous()
        dist.broadcast(logits, group=ranks.group, group_src=ranks.size - 1)
        return logits
