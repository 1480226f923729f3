"""Running a program in this process, from the live model: eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType

import torch
from transformers import PreTrainedModel

from ..attention import ATTENTION
from ..cache import ExportableCache
from ..program import Method, ResidentModule, methods_for


class ModuleRunner:
    """Runs the resident form of a program over the cache's own tensors.

    The model's attention implementation is switched to ours, for good.

    Args:
        model: A transformers causal LM.
        cache: Its cache; its keys and values are written, its lengths are not.
        compiled: Compile decode (static shapes) and prefill (dynamic length), one graph each.
        prefill_length: See `methods_for`.
    """

    def __init__(
        self, model: PreTrainedModel, cache: ExportableCache, compiled: bool = False, prefill_length: int | None = None
    ) -> None:
        model.set_attn_implementation(ATTENTION)
        self.methods: Mapping[str, Method] = methods_for(cache, prefill_length)
        self.module = ResidentModule(model, cache)
        self._compiled = compiled
        self._calls = {"decode": self.module, "prefill": self.module}
        if compiled:
            self._calls = {
                "decode": torch.compile(_step_of(self.module), fullgraph=True, dynamic=False),
                "prefill": torch.compile(_step_of(self.module), fullgraph=True),
            }

    @torch.no_grad()
    def run(self, method: str, input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        # Guards look at strides, which a slice of a longer prompt carries along, and dynamic sizes are marked on the tensor.
        input_ids = input_ids.clone(memory_format=torch.contiguous_format)
        if self._compiled and method == "prefill":
            torch._dynamo.mark_dynamic(input_ids, 1, min=2, max=self.methods["prefill"].max_length)
        return self._calls[method](input_ids, input_pos)


def _step_of(module: torch.nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function that calls `module`, with a code object of its own.

    TorchDynamo keeps compiled graphs per code object: methods, and runners, that shared one would count as
    recompilations of each other and together run into the recompile limit.
    """

    def step(input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        return module(input_ids, input_pos)

    return FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
