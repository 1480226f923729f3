"""The registry: which patches each model type needs, checked wherever a model meets a cache.

Types are those of the configs that transformers' models are made of, so a patch is found before any model exists:
from a config, or from the types that a saved cache names. A type without an entry needs none.
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
#: Model type -> what is set on the modules of each model, and the name of that in reports; "" to leave it out.
PREPARATIONS: dict[str, tuple[str, Callable[[nn.Module], None]]] = {}
for _family in _FAMILIES:
    for _model_type, _patches in getattr(_family, "PATCHES", {}).items():
        # Some types, such as RoFormer's, are in two families.
        PATCHES[_model_type] = PATCHES.get(_model_type, ()) + _patches
    PREPARATIONS.update(getattr(_family, "PREPARATIONS", {}))

#: Functions that every modeling file with one has a copy of: a copy without an entry is of a model that was overlooked.
COPIED = frozenset(scan_functions.COPIED)


def patch_model(model: nn.Module) -> list[str]:
    """Apply the patches that a model needs. Calling it again changes nothing.

    Returns:
        Labels of the patches without which it would be wrong, sorted.

    Raises:
        UnsupportedModelError: If an original is missing or changed; if the model is of a type with patches, and not
            made of transformers' own classes; or if its file has a function that is replaced elsewhere, and no patch.
    """
    labels = set()
    files = {type(module).__module__ for module in model.modules()}
    for model_type in model_types(model):
        for patch in PATCHES.get(model_type, ()):
            if patch.module_name not in files and patch.needed:
                raise UnsupportedModelError(
                    f"a model of type {model_type!r} needs the patch of {patch.name} ({patch.reason}), and has no "
                    f"module of {patch.module_name}; use transformers' own class (trust_remote_code=False), or "
                    "DynamicCache"
                )
            if patch.module_name in files and patch.apply() and patch.needed:
                labels.add(patch.label)
    for name in files:
        for function in COPIED:
            copied = getattr(sys.modules.get(name), function, None)
            if copied is not None and not hasattr(copied, ORIGINAL):
                raise UnsupportedModelError(
                    f"{name} has a function {function!r}, which is wrong with a static cache, and no patch for the "
                    f"types {', '.join(sorted(model_types(model)))}; add one to models/patches, or use DynamicCache"
                )
    labels |= prepare_model(model) | patch_rope(model)
    return sorted(labels - {""})


def prepare_model(model: nn.Module) -> set[str]:
    """Set on the modules of a model what they need. Calling it again changes nothing.

    Returns:
        Labels of what was set.
    """
    labels = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config.model_type in PREPARATIONS:
            label, prepare = PREPARATIONS[module.config.model_type]
            prepare(module)
            labels.add(label)
    return labels


def patch_types(types: Iterable[str]) -> None:
    """Apply the patches of model types, before a model of them is there.

    Raises:
        UnsupportedModelError: If an original is missing or changed.
    """
    for model_type in types:
        for patch in PATCHES.get(model_type, ()):
            patch.apply()


def patch_imported() -> None:
    """Apply the patches of all modeling files that are imported, for a cache that does not know which model it is for.

    Raises:
        UnsupportedModelError: If an original is missing or changed.
    """
    for patches in PATCHES.values():
        for patch in patches:
            if patch.module_name in sys.modules:
                patch.apply()


def model_types(model: nn.Module) -> set[str]:
    """Of the transformers models that a model is made of."""
    return {module.config.model_type for module in model.modules() if isinstance(module, PreTrainedModel)}


def config_types(config: PreTrainedConfig) -> set[str]:
    """Of a config and of those inside it."""
    inside = (getattr(config, name, None) for name in config.sub_configs)
    return {config.model_type}.union(*(config_types(one) for one in inside if isinstance(one, PreTrainedConfig)))
