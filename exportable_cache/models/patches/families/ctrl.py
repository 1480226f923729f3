"""CTRL: it sets its position table, an `nn.Buffer`, again in every step (ctrl/modeling_ctrl.py).

TorchDynamo 2.13 does not support the attribute `persistent` that `Module.__setattr__` then reads
(torch/nn/modules/module.py), so the table becomes an ordinary buffer. No function of transformers is replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def _with_a_plain_buffer(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__name__ == "CTRLModel":
            table = module.pos_encoding
            assert isinstance(table, torch.Tensor)
            is_persistent = "pos_encoding" in module.state_dict(keep_vars=True)
            module.register_buffer("pos_encoding", table.detach(), persistent=is_persistent)


#: Model type -> label, and a function that prepares the modules of a model.
PREPARATIONS = {"ctrl": ("CTRLModel", _with_a_plain_buffer)}
