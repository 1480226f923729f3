"""Registry of the patches that each model type needs; applied wherever a model gets a cache.

Model types come from configs, so patches are found without a model: from a config, or from the types in a saved cache.
Types without an entry need no patches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig, PreTrainedModel

from ...common.patch import ORIGINAL
from ...errors import UnsupportedModelError
from .families import (
    bloom,
    ctrl,
    deepseek_v4,
    falcon,
    fsmt,
    git,
    glm5_next,
    gpt_neo,
    jetmoe,
    led,
    mllama,
    mpt,
    openai_gpt,
    prophetnet,
    qwen4_exp,
    unlimited_ocr,
    xmod,
    zaya,
)
from .mechanisms import experts, fused_attention, host_tensors, masks, position_tables, rope, speech
from .mechanisms.rope import patch_rope
from .recurrent import minimax, recurrent_gemma, rwkv, scan_functions, xlstm

if TYPE_CHECKING:
    from torch import nn

    from ...common.patch import Patch

_FAMILIES = (
    bloom,
    ctrl,
    deepseek_v4,
    experts,
    falcon,
    fsmt,
    fused_attention,
    git,
    glm5_next,
    gpt_neo,
    host_tensors,
    jetmoe,
    led,
    masks,
    minimax,
    mllama,
    mpt,
    openai_gpt,
    position_tables,
    prophetnet,
    qwen4_exp,
    recurrent_gemma,
    rope,
    rwkv,
    scan_functions,
    speech,
    unlimited_ocr,
    xlstm,
    xmod,
    zaya,
)

#: Model type -> its patches.
PATCHES: dict[str, tuple[Patch, ...]] = {}
#: Model type -> label in reports ("" to leave it out), and a function that prepares the modules of a model.
PREPARATIONS: dict[str, tuple[str, Callable[[nn.Module], None]]] = {}
for _family in _FAMILIES:
    for _model_type, _patches in getattr(_family, "PATCHES", {}).items():
        # Because some types, such as RoFormer, are in two files.
        PATCHES[_model_type] = PATCHES.get(_model_type, ()) + _patches
    PREPARATIONS.update(getattr(_family, "PREPARATIONS", {}))

#: Functions that modeling files copy. A copy without an entry belongs to a model that was overlooked.
COPIED = frozenset(scan_functions.COPIED)


def patch_model(model: nn.Module) -> list[str]:
    """Apply the patches that a model needs. Calling it again changes nothing.

    Returns:
        Sorted labels of the patches that its results need.

    Raises:
        UnsupportedModelError: If an original is missing or changed, if a type with patches does not use transformers'
            classes, or if a modeling file has a function of `COPIED` without a patch.
    """
    labels = set()
    files = {type(module).__module__ for module in model.modules()}
    for model_type in model_types(model):
        for patch in PATCHES.get(model_type, ()):
            if patch.module_name not in files and patch.needed:
                raise UnsupportedModelError(
                    f"a model of type {model_type!r} needs the patch of {patch.name} ({patch.reason}), but has no "
                    f"module of {patch.module_name}; use transformers' class (trust_remote_code=False), or "
                    "DynamicCache"
                )
            if patch.module_name in files and patch.apply() and patch.needed:
                labels.add(patch.label)
    for name in files:
        for function in COPIED:
            copied = getattr(sys.modules.get(name), function, None)
            if copied is not None and not hasattr(copied, ORIGINAL):
                raise UnsupportedModelError(
                    f"{name} has a function {function!r}, which is wrong with a static cache, but no patch for the "
                    f"types {', '.join(sorted(model_types(model)))}; add one to models/patches, or use DynamicCache"
                )
    labels |= prepare_model(model) | patch_rope(model)
    return sorted(labels - {""})


def prepare_model(model: nn.Module) -> set[str]:
    """Set attributes that patches need on the modules of a model. Calling it again changes nothing.

    Returns:
        Labels of the preparations.
    """
    labels = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config.model_type in PREPARATIONS:
            label, prepare = PREPARATIONS[module.config.model_type]
            prepare(module)
            labels.add(label)
    return labels


def patch_types(types: Iterable[str]) -> None:
    """Apply the patches of model types, before a model is created.

    Raises:
        UnsupportedModelError: If an original is missing or changed.
    """
    for model_type in types:
        for patch in PATCHES.get(model_type, ()):
            patch.apply()


def patch_imported() -> None:
    """Apply the patches of all imported modeling files, for a cache whose model is unknown.

    Raises:
        UnsupportedModelError: If an original is missing or changed.
    """
    for patches in PATCHES.values():
        for patch in patches:
            if patch.module_name in sys.modules:
                patch.apply()


def model_types(model: nn.Module) -> set[str]:
    """Return the model types of all transformers models inside a model."""
    return {module.config.model_type for module in model.modules() if isinstance(module, PreTrainedModel)}


def config_types(config: PreTrainedConfig) -> set[str]:
    """Return the model types of a config and of the configs inside it."""
    inside = (getattr(config, name, None) for name in config.sub_configs)
    return {config.model_type}.union(*(config_types(one) for one in inside if isinstance(one, PreTrainedConfig)))
