"""Steps of a model whose layers are split over processes: the rows go through the stages in micro-batches.

Stages hand hidden states on by plain sends. `torch.distributed.pipelining` has schedules of one forward (and backward)
pass over micro-batches of equal shape that it splits itself; it knows no state of rows, which a cache is.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ...cache.step import StepContext
from ...errors import InputError
from ..base import BegunStep
from .runner import ModuleRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...generation.sampling import Sampler
    from ...models.cache_factory import ExportableCache
    from ...models.parallel.stages import Stage
    from ...program.spec import ProgramSpec
    from .compile import CompileOptions


class StageForward:
    """A stage's part of a model's forward: its layers, over what the stage before gives.

    Args:
        model: Loaded by transformers, whose own forward sends every call's logits to all before the next may begin.
        stage: Of it.

    Attributes:
        users: Runners that call it.
        theirs: The forward that it stands in for.
    """

    def __init__(self, model: PreTrainedModel, stage: Stage) -> None:
        self._model, self._stage = model, stage
        self.users = 0
        self.theirs = model.forward
        self._sends: list[Any] = []
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
        self._sends.append(dist.isend(hidden, group=ranks.group, group_dst=ranks.rank + 1))
        return SimpleNamespace(logits=hidden)

    def taken_sends(self) -> list[Any]:
        """What was sent since the last call, which may not have left yet."""
        sends, self._sends = self._sends, []
        return sends


def _borrow_forward(model: PreTrainedModel, stage: Stage) -> StageForward:
    """A model's forward as its stage, one for all runners over it."""
    forward = model.forward
    if not isinstance(forward, StageForward):
        forward = StageForward(model, stage)
        model.forward = forward
    forward.users += 1
    return forward


def _put_back(model: PreTrainedModel, forward: StageForward) -> None:
    """The model's own, once no runner is left."""
    forward.users -= 1
    if forward.users == 0:
        model.forward = forward.theirs


class StagedRunner(ModuleRunner):
    """A stage's part of each step: every process runs the same calls, and all get the last one's logits.

    While one stage computes a micro-batch, the one before it computes the next: with as many micro-batches as stages,
    and rows for them, of `2 * stages - 1` turns each stage works in `stages`. Where steps of a micro-batch follow its
    own logits alone (`begin` and `finish`), the pipeline stays full.

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
        self._forward = _borrow_forward(model, self.stage)
        self._put_back = weakref.finalize(self, _put_back, model, self._forward)
        self._put_back.atexit = False
        self._under_way: deque[BegunStep] = deque()

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

    # -- steps of some rows --------------------------------------------------------------------------------------------

    @property
    def row_groups(self) -> Sequence[range]:
        """As many micro-batches of rows as there are stages, where there are rows for them."""
        size = self._layout.batch_size
        parts = torch.arange(size).tensor_split(min(size, self.stage.ranks.size))
        return [range(int(part[0]), int(part[-1]) + 1) for part in parts]

    @torch.no_grad()
    def begin(self, method: str, rows: range, *inputs: torch.Tensor) -> BegunStep:
        """This stage's part of a step of some rows, see `OverlapsSteps`. The last stage hands its logits out at once.

        Raises:
            RankLostError: If another stage is gone.
        """
        with self.stage.ranks.watched():
            begun = self._part(method, rows, inputs)
            sends = [] if begun.logits is None else self._handed_out(begun.logits)
        self._under_way.append(replace(begun, sends=[*begun.sends, *sends]))
        return self._under_way[-1]

    @torch.no_grad()
    def finish(self, begun: BegunStep) -> torch.Tensor:
        """Logits [len(rows), vocab] of the last stage, on all.

        Raises:
            RankLostError: If another stage is gone.
        """
        assert begun is self._under_way[0]
        with self.stage.ranks.watched():
            logits = begun.logits if self.stage.is_last else self._received()
            for send in begun.sends:
                send.wait()
        self._under_way.popleft()
        assert logits is not None
        return logits

    def _whole_step(self, method: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._under_way:
            raise InputError(
                f"steps of {len(self._under_way)} groups of rows are under way in this session's continuous batch; "
                "take its run() to the end first"
            )
        parts = []
        for rows in self.row_groups:
            parts.append(self._part(method, rows, [tensor[rows.start : rows.stop] for tensor in inputs]))
        for send in (send for part in parts for send in part.sends):
            send.wait()
        given = [part.logits for part in parts if part.logits is not None]
        return self._of_last(torch.cat(given) if given else None)

    def _part(self, method: str, rows: range, inputs: Sequence[torch.Tensor]) -> BegunStep:
        """This stage's layers over some rows; logits are those of the last stage alone."""
        module, step = self.modules[method], self.methods[method]
        tensors = {name: tensor.narrow(0, rows.start, len(rows)) for name, tensor in self.state.items()}
        cache = self._layout.with_state(tensors, StepContext(inputs[1], step.kv_read_len))
        given = module.run(cache, **dict(zip(step.input_names, inputs, strict=True)))  # type: ignore[operator]
        return BegunStep(rows, given if self.stage.is_last else None, self._forward.taken_sends())

    # -- the last stage's logits ---------------------------------------------------------------------------------------

    def _shape(self, logits: torch.Tensor | None) -> torch.Tensor:
        """What tells a shape of at most three dimensions: int64 [4], their number first."""
        shape = torch.zeros(4, dtype=torch.int64, device=self.stage.ranks.device)
        if logits is not None:
            shape[: 1 + logits.dim()] = torch.tensor([logits.dim(), *logits.shape])
        return shape

    def _room(self, shape: torch.Tensor) -> torch.Tensor:
        number, *sizes = shape.tolist()
        return torch.empty(sizes[:number], dtype=self._forward.dtype, device=self.stage.ranks.device)

    def _of_last(self, logits: torch.Tensor | None) -> torch.Tensor:
        """The last stage's logits on all, which are told their shape first."""
        ranks, shape = self.stage.ranks, self._shape(logits)
        dist.broadcast(shape, group=ranks.group, group_src=ranks.size - 1)
        logits = self._room(shape) if logits is None else logits.contiguous()
        dist.broadcast(logits, group=ranks.group, group_src=ranks.size - 1)
        return logits

    def _handed_out(self, logits: torch.Tensor) -> list[Any]:
        """The same by sends, for which no stage has to be there yet: nothing else is sent from the last to others."""
        ranks = self.stage.ranks
        sent = [self._shape(logits), logits.contiguous()]
        return [dist.isend(one, group=ranks.group, group_dst=to) for to in range(ranks.size - 1) for one in sent]

    def _received(self) -> torch.Tensor:
        ranks, shape = self.stage.ranks, self._shape(None)
        dist.recv(shape, group=ranks.group, group_src=ranks.size - 1)
        logits = self._room(shape)
        dist.recv(logits, group=ranks.group, group_src=ranks.size - 1)
        return logits
