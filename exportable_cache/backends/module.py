"""Running a program in this process, from the live model: eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType

import torch
from transformers import PreTrainedModel

from ..attention import ATTENTION
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
        prefill_length, buckets: See `methods_for`.
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
    ) -> None:
        model.set_attn_implementation(ATTENTION)
        self.methods: Mapping[str, Method] = methods_for(cache, prefill_length, buckets=buckets)
        self.modules = {
            length: ResidentModule(model, cache, read_length=length)
            for length in {method.read_length for method in self.methods.values()}
        }
        self._compiled = compiled
        if mode is None and cache.layers[0].device.type == "cuda":
            mode = "reduce-overhead"
        self._calls: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {}
        for name, method in self.methods.items():
            module = self.modules[method.read_length]
            is_static = method.min_length == method.max_length
            self._calls[name] = (
                torch.compile(_step_of(module), fullgraph=True, dynamic=False if is_static else None, mode=mode)
                if compiled
                else module
            )

    @torch.no_grad()
    def run(self, method: str, input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        # Guards look at strides, which a slice of a longer prompt carries along, and dynamic sizes are marked on the tensor.
        input_ids = input_ids.clone(memory_format=torch.contiguous_format)
        described = self.methods[method]
        if self._compiled and described.min_length != described.max_length:
            torch._dynamo.mark_dynamic(input_ids, 1, min=described.min_length, max=described.max_length)
        return self._calls[method](input_ids, input_pos)


def _step_of(module: torch.nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function that calls `module`, with a code object of its own.

    TorchDynamo keeps compiled graphs per code object: methods, and runners, that shared one would count as
    recompilations of each other and together run into the recompile limit.
    """

    def step(input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        return module(input_ids, input_pos)

    return FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
