"""What programs with this package's operators answer; run in a process of its own, which loads the compiled kernels.

`python -m tests.kernels.native_programs FOLDER NAME...` exports each by name and compares its logits with the eager
model's, in `DynamicCache`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exportable_cache import Session, export, load
from exportable_cache.common.native.kernels import load_native_kernels

from ..support.kinds import KINDS, kind_model
from ..support.models import WINDOW, tiny_model, tokens
from ..support.oracle import difference, reference_logits
from ..test_ragged import check_rows
from .native_expert_programs import check_experts, check_mixtures
from .native_linear_programs import check_linears
from .native_operator_calls import check_operators

TOLERANCE = 1e-4
CAPACITY, CHUNK = 64, 13

#: Besides these, all kinds of calls in one program, linear layers of 4 bits, and experts.
OPERATORS, LINEARS, EXPERTS, MIXTURES = "operators", "linears", "experts", "mixtures"
_CHECKS = {
    OPERATORS: check_operators,
    LINEARS: check_linears,
    EXPERTS: check_experts,
    MIXTURES: check_mixtures,
}
#: Model type, fields of its config, options of the export.
PROGRAMS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Soft-capping, a ring that keeps more than its window, and rows of different length.
    "rows": ("gemma2", {}, {"batch_size": 3, "rollback_slots": 3}),
    "sink logits": ("gpt_oss", {}, {}),
    "chunks": ("llama4_text", {}, {}),
    "position bias": ("bloom", {"n_layer": 2, "n_head": 4}, {}),
    "position bias of another form": ("mpt", {"n_layers": 2, "n_heads": 4, "d_model": 32, "max_seq_len": 64}, {}),
    "shared keys, read for the last token": ("gemma4_text", {}, {}),
    "keys beside states": ("falcon_h1", {}, {}),
    "latents": ("deepseek_v3", {}, {"batch_size": 2}),
    "latents, of which some are chosen": ("deepseek_v32", {}, {}),
}


def check(name: str, folder: Path) -> None:
    """Export a program, and compare what it answers past its windows, in chunks, from the start again and after tokens
    were taken back.
    """
    family, fields, options = PROGRAMS[name]
    model = kind_model(family) if family in KINDS else tiny_model(family, **fields)
    made = {"prefill_chunk": CHUNK, "kernels": "native", "verify": False, **options}
    export(model, "executorch", CAPACITY, folder, **made)
    before = load_native_kernels().attention_calls
    session = load(folder)
    rows = options.get("batch_size", 1)
    if rows > 1:
        check_rows(session, model, (3, WINDOW, 29)[-rows:], "left")
        session.reset()
        check_rows(session, model, (1, 20, 2)[-rows:], "right")
        check_taken_back(session, model)
    else:
        for prompt in (3, WINDOW + 1, 40):
            ids = tokens(prompt + 12, seed=prompt)
            session.reset()
            found = difference(session.prefill, reference_logits(model, ids, prompt), ids, prompt)
            assert found <= TOLERANCE, (name, prompt, found)
    assert load_native_kernels().attention_calls > before


def check_taken_back(session: Session, model: Any) -> None:
    """Tokens that the ring still has slots for are taken back past its window, and others take their place."""
    rows = session.batch_size
    ids, others = tokens(24, rows), tokens(9, rows, seed=1)
    session.reset()
    session.prefill(ids)
    session.rewind(3)
    logits = session.prefill(others)
    expected = torch.cat([ids[:, :-3], others], dim=1)
    assert (logits - reference_logits(model, expected, expected.shape[1])[:, 0]).abs().max() <= TOLERANCE


if __name__ == "__main__":
    for program in sys.argv[2:]:
        place = Path(sys.argv[1]) / program.replace(" ", "-")
        if program in _CHECKS:
            _CHECKS[program](place)
        else:
            check(program, place)
