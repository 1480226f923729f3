"""Model types with multi-token-prediction (MTP) modules, and whether these can be a draft: a table of a guide.

`python -m tests.zoo.mtp_table` writes it. If the config of a type has `num_mtp_layers`, transformers can load the modules:
tiny random ones are attached to a tiny random model, and must propose as in transformers. Of other types the code of the
model names weights of modules that are not loaded.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from exportable_cache import Session
from exportable_cache.errors import UnsupportedModelError, first_line
from exportable_cache.models.draft_heads import attach_predictor

from .architectures import Architecture, architectures
from .build import initialised, tokens
from .shrink import WINDOW, tiny_config

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "speculate.md"
#: What is before and after the rows of the table.
_HEAD, _END = '| model type | `draft="mtp"` |\n|---|---|\n', "\n\n"
_MODELS = Path(transformers.__file__).parent / "models"
#: Names of weights that are not loaded: `mtp`, or a layer after the last one of a released model.
_NOT_LOADED = re.compile(
    r"_keys_to_ignore_on_load_unexpected = \[[^\]]*?(\bmtp|_mtp|\.mtp|layers\\\.\d)", re.IGNORECASE
)
_LENGTH = 12
_WORKS = "works: proposals of tiny random modules equal those of transformers"
_DROPPED = "refused: transformers does not load their modules (their configs have no `num_mtp_layers`)"


def with_modules() -> dict[str, Architecture]:
    """Return the architectures whose configs have `num_mtp_layers`, by model type."""
    sources = {
        path.parent.name for path in _MODELS.glob("*/configuration_*.py") if "num_mtp_layers" in path.read_text()
    }
    found = {}
    for one in architectures():
        folder = one.shrinks.__module__.split(".")[-2]
        if folder in sources and hasattr(text := one.shrinks().get_text_config(decoder=True), "num_mtp_layers"):
            # A text model is simpler than a composite one with the same text config.
            found[text.model_type] = one if text.model_type == one.model_type else found.get(text.model_type, one)
    return {one.model_type: one for one in found.values()}


def without_modules() -> list[str]:
    """Return the folders of other models whose code names weights of modules that are not loaded."""
    loaded = {one.shrinks.__module__.split(".")[-2] for one in with_modules().values()}
    found = {path.parent.name for path in _MODELS.glob("*/modeling_*.py") if _NOT_LOADED.search(path.read_text())}
    return sorted(found - loaded)


def outcome(architecture: Architecture) -> str:
    """Return whether tiny random modules propose tokens as in transformers, or the reason why not."""
    shrunk = tiny_config(architecture.shrinks, WINDOW, architecture.fields)
    text, fields = shrunk.get_text_config(decoder=True), shrunk.to_dict()
    part = next((name for name in shrunk.sub_configs if getattr(shrunk, name) is text), None)
    # Some configs store the number under the name that checkpoints use.
    stored = text.attribute_map.get("num_mtp_layers", "num_mtp_layers")
    changed: dict[str, Any] = {"num_mtp_layers": 1, stored: 1}
    own = {one.name for one in dataclasses.fields(text)}
    for name in ("layer_types", "mlp_layer_types"):
        # The default may be a type that the shrunk model has no RoPE for.
        if f"mtp_{name}" in own and getattr(text, name, None):
            changed[f"mtp_{name}"] = getattr(text, name)[-1:]
    (fields if part is None else fields[part]).update(changed)
    try:
        model = initialised(architecture, architecture.shrinks.from_dict(fields))
        mtp = _random_modules(model)
    except Exception as error:  # whatever transformers' code raises
        return f"refused: transformers cannot make their modules ({first_line(error)[:120]})"
    try:
        return _WORKS if _differ_by(model, mtp) < 1e-4 else "wrong"
    except UnsupportedModelError as error:
        return f"refused: {str(error).split(': ', 1)[-1].split(';')[0]}"


def _random_modules(model: PreTrainedModel) -> MtpModel:
    mtp = MtpModel(model, 1).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in mtp.layers.parameters():
            values = 0.3 * torch.randn_like(parameter)
            parameter.copy_(values if parameter.dim() > 1 else 1 + values / 3)
    return mtp


@torch.no_grad()
def _differ_by(model: PreTrainedModel, mtp: MtpModel) -> float:
    """Return the largest difference of a proposal's logits from transformers', after a prompt in two chunks."""
    ids = tokens(model, length=_LENGTH + 1)
    hidden = model(ids[:, :_LENGTH], output_hidden_states=-1).hidden_states[-1]
    positions, cache = torch.arange(1, _LENGTH + 1)[None], MtpCache(config=mtp.config)
    _, wanted, _ = mtp(ids[:, 1:], hidden, None, positions, cache)
    attach_predictor(model, mtp)
    with Session.from_model(model, max_cache_len=2 * _LENGTH, prefill_chunk=_LENGTH - 4) as session:
        session.prefill(ids[:, :_LENGTH])
        found = session.stepper.draft(int(ids[0, -1]), 0)
    return float((found - wanted[:, 0]).abs().max())


def rows(outcomes: dict[str, str]) -> list[str]:
    """Return the rows of the table, those of equal outcomes together."""
    grouped: dict[str, list[str]] = {}
    for name, text in [*outcomes.items(), *((name, _DROPPED) for name in without_modules())]:
        grouped.setdefault(text, []).append(f"`{name}`")
    return [f"| {', '.join(sorted(names))} | {text} |" for text, names in sorted(grouped.items(), reverse=True)]


def in_guide() -> list[str]:
    """Return the rows that the guide has."""
    return GUIDE.read_text().split(_HEAD)[1].split(_END)[0].splitlines()


def write_table() -> None:
    """Write the table into the guide."""
    text = GUIDE.read_text()
    before, after = text.split(_HEAD)
    found = {name: outcome(one) for name, one in with_modules().items()}
    GUIDE.write_text(before + _HEAD + "\n".join(rows(found)) + _END + after.split(_END, 1)[1])


if __name__ == "__main__":
    write_table()
