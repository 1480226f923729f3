"""Running a program in this process, from the live model: eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType

import torch
from transformers import PreTrainedModel

from ..attention import ATTENTION, set_attention
from ..cache import ExportableCache
from ..methods import Method, methods_for
from ..program import ResidentModule


class ModuleRunner:
    """Runs the resident form of a program over the cache's own tensors.

    The model's attention implementation is switched to ours, for good.

    Args:
        model: A transformers causal LM.
        cache: Its cache; its keys and values are written, its lengths are not.
        compiled: Compile every method into one graph: decode with static shapes, prefill with a dynamic length.
        mode: Of torch.compile; `reduce-overhead` (CUDA graphs) by default on a GPU.
        prefill_length, buckets, score_length: See `methods_for`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: ExportableCache,
        *,
        compiled: bool = False,
        mode: str | None = None,
        prefill_length: int | None = None,
        buckets: Sequence[int] = (),
        score_length: int = 0,
    ) -> None:
        set_attention(model, ATTENTION)
        self.methods: Mapping[str, Method] = methods_for(cache, prefill_length, buckets=buckets, score_length=score_length)
        self.modules = {name: ResidentModule(model, cache, method) for name, method in self.methods.items()}
        self.state: Mapping[str, torch.Tensor] = cache.stored_state()
        self._compiled = compiled
        if mode is None and cache.device.type == "cuda":
            mode = "reduce-overhead"
        self._calls: dict[str, Callable[..., torch.Tensor]] = dict(self.modules)
        if compiled:
            for name, module in self.modules.items():
                dynamic = None if self.methods[name].dynamic_sizes else False
                self._calls[name] = torch.compile(_step_of(module), fullgraph=True, dynamic=dynamic, mode=mode)

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor:
        if self._compiled:
            inputs = tuple(_marked(self.methods[method], inputs))
        return self._calls[method](*inputs)


def _marked(method: Method, inputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Copies of the inputs that say which of their sizes are dynamic.

    Guards look at strides, which a slice of a longer prompt carries along, and dynamic sizes are marked on the tensor.
    """
    sizes = method.dynamic_sizes
    for spec, tensor in zip(method.inputs, inputs, strict=True):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        for index, size in enumerate(spec.shape):
            if size in sizes:
                torch._dynamo.mark_dynamic(tensor, index, min=sizes[size][0], max=sizes[size][1])
        yield tensor


def _step_of(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """A function that calls `module`, with a code object of its own.

    TorchDynamo keeps compiled graphs per code object: methods, and runners, that shared one would count as
    recompilations of each other and together run into the recompile limit.
    """

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        return module(*inputs)

    return FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
