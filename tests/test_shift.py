"""Shifts of the context: old tokens are dropped, and the others have the keys of their new positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.backends.executorch.attention.layouts import NativeLatentLayout
from exportable_cache.cache.layers import CacheLayer, RowSizes
from exportable_cache.cache.policies import FullPolicy
from exportable_cache.cache.shift import Rotation
from exportable_cache.cache.storage import FloatStorage
from exportable_cache.common.fs.tensor_files import write_tensors
from exportable_cache.decoding import PromptLookup
from exportable_cache.errors import BundleError, CacheFullError, InputError, UnsupportedModelError
from exportable_cache.models.rotations import find_rotations, in_layout
from exportable_cache.program.shift import ShiftModule
from exportable_cache.session.images import Placed, PlacedImages
from exportable_cache.session.state import SequenceState

from .support.kinds import kind_model
from .support.models import WINDOW, among, hybrid_model, tiny_model, tokens
from .support.multimodal import FAMILIES, tiny_multimodal
from .support.multimodal import prompt as multimodal_prompt
from .support.shifted import ShiftOracle
from .test_rope import KINDS as ROPES

SLOTS, PROTECTED, SHIFTS = 40, 4, 10
_FULL = {"sliding_window": None}
_BORDER = {"original_max_position_embeddings": 64}
#: Config fields of further models, by name: model type, and fields past the tests' common sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral, sliding": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "gemma3, two bases": ("gemma3_text", {}),
    "qwen3, normed keys": ("qwen3", {}),
    "gpt_oss, yarn": ("gpt_oss", {}),
    "cohere2, every other layer without positions": ("cohere2", {}),
    "cohere, interleaved": ("cohere", {"logit_scale": 1.0}),
    "olmo2": ("olmo2", {}),
    "phi, partial": ("phi", {"partial_rotary_factor": 0.5}),
    "gpt_neox, partial": ("gpt_neox", {"rotary_pct": 0.25}),
    "gptj, interleaved and partial": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "glm, interleaved and partial": ("glm", {}),
    "stablelm, partial": ("stablelm", {}),
    "granite": ("granite", {}),
    "smollm3, some layers without positions": ("smollm3", {"no_rope_layers": [1, 0]}),
    "bloom, ALiBi": ("bloom", {"n_layer": 2, "n_head": 4}),
    "phi3, longrope below its border": (
        "phi3",
        {**_FULL, "rope_parameters": {**ROPES["longrope phi3"][1]["rope_parameters"], **_BORDER}, **_BORDER},
    ),
    "llama, dynamic below its border": (
        "llama",
        {"rope_parameters": ROPES["dynamic llama"][1]["rope_parameters"], "max_position_embeddings": 64},
    ),
    # Past the border and back, those named "static" with one set of factors.
    **ROPES,
}
#: Of `support.kinds`: latents, chunks with complex factors, shared keys with proportional RoPE, and linear states.
KINDS = ("deepseek_v3", "llama4_text", "gemma3n_text", "gemma4_text", "falcon_h1", "qwen3_next", "bamba", "lfm2")
#: With positions on three axes, for text.
AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAST = (
    "llama",
    "gemma3, two bases",
    "gptj, interleaved and partial",
    "deepseek_v3",
    "longrope phimoe",
    "dynamic gemma3",
)


def _model(name: str) -> Any:
    if name in KINDS:
        return kind_model(name)
    if name in AXES:
        return tiny_multimodal(name)
    family, fields = MODELS[name]
    return tiny_model(family, **fields)


def _session(model: Any, **options: Any) -> Session:
    return Session.from_model(model, ExportableCache.from_model(model, SLOTS), **options)


def _difference(session: Any, oracle: ShiftOracle, shifts: int = SHIFTS, protected: int = PROTECTED) -> float:
    """Return the largest logit difference over several shifts of a full cache, each step of both compared."""
    ids, fed, worst = tokens(1000), SLOTS - 3, 0.0
    pairs = [(session.prefill(ids[:, :fed]), oracle.feed(ids[:, :fed]))]
    for index in range(shifts):
        while int(session.length) < SLOTS:
            token = ids[:, fed : fed + 1]
            pairs.append((session.decode(token[0]), oracle.feed(token)))
            fed += 1
        count = (5, 11, SLOTS - protected - WINDOW)[index % 3]
        session.shift(count, protected)
        oracle.drop(count, protected)
        assert session.length.tolist() == [SLOTS - count]
        # A chunk after a shift, and then single tokens.
        pairs.append((session.prefill(ids[:, fed : fed + 2]), oracle.feed(ids[:, fed : fed + 2])))
        fed += 2
    for ours, theirs in pairs:
        assert bool(torch.isfinite(ours).all())
        worst = max(worst, float((ours - theirs).abs().max()))
    return worst


@pytest.mark.parametrize("name", among([*MODELS, *KINDS, *AXES], FAST))
def test_logits_after_shifts_are_those_of_the_model_over_the_kept_keys(name: str) -> None:
    """Check ten shifts of a full cache against keys that the model computed at the new positions."""
    model = _model(name)
    oracle = ShiftOracle(model)
    with _session(model) as session:
        assert _difference(session, oracle) < 5e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_bias_in_one_pair_does_not_hide_the_rotation_of_the_others(dtype: torch.dtype) -> None:
    """Check Qwen2's keys, whose bias in the slowest pair is hundreds of times as large as the other elements."""
    model, plain = (tiny_model("qwen2") for _ in range(2))
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.detach().view(-1, layer.self_attn.head_dim)
        bias[:, [bias.shape[1] // 2 - 1, -1]] = 150.0
    found, expected = (
        find_rotations(one, ExportableCache.from_model(one, SLOTS))[0] for one in (model.to(dtype), plain)
    )
    assert found == expected and None not in found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "keys of layer 0 are not a rotation by their position"),
        ("deepseek_v32", "layer 0 \\(full \\+ indexer\\) keeps more than keys and values by position"),
    ],
)
def test_models_that_cannot_be_shifted_are_refused(name: str, reason: str) -> None:
    """Check that the error says why, and that the session is unchanged."""
    if name == "gpt2":
        model = tiny_model("gpt2", n_embd=32, n_layer=2, n_head=4)
    else:
        model = kind_model(name)
    with _session(model) as session:
        session.prefill(tokens(20))
        with pytest.raises(UnsupportedModelError, match=reason):
            session.shift(4)
        assert session.length.tolist() == [20]
        session.decode(tokens(1)[0])
        # The answer is kept, so the model is not run again to find it.
        model.register_forward_pre_hook(lambda *_: pytest.fail("the model was probed again"))
        with pytest.raises(UnsupportedModelError, match=reason):
            session.shift(4)


@pytest.mark.parametrize(
    ("count", "first", "message"),
    [
        (0, 0, "count must be an int of at least 1, got 0"),
        (4, -1, "first must be an int of at least 0, got -1"),
        (True, 0, "count must be an int of at least 1, got True"),
        (18, 4, "count must be at most 16 from position 4 on, got 18"),
        (3, 21, "count must be at most -1 from position 21 on, got 3"),
    ],
)
def test_counts_out_of_range_are_refused(count: Any, first: Any, message: str) -> None:
    """Check that a refused shift says which numbers are possible, and changes nothing."""
    with _session(tiny_model("llama")) as session:
        session.prefill(tokens(20))
        with pytest.raises(InputError, match=message):
            session.shift(count, first)
        assert session.length.tolist() == [20]


def test_windows_keep_the_tokens_that_they_see() -> None:
    """Check that protected tokens do not come into the sight of a ring that has lost them."""
    with _session(tiny_model("mistral")) as session:
        session.prefill(tokens(30))
        with pytest.raises(InputError, match=f"count must be at most {30 - 4 - WINDOW + 1} from position 4 on"):
            session.shift(24, 4)
        # Without protected tokens there are none that could be lost.
        session.shift(24)
        assert session.length.tolist() == [6]


def test_latents_move_in_the_layout_of_native_operators() -> None:
    """Check that latents and their rotated part move in one tensor as they do in two."""
    latent, pairs, count = 16, 4, 11
    portable = CacheLayer(FullPolicy(SLOTS), FloatStorage("float32"), RowSizes(1, 1, latent, 2 * pairs))
    for tensor in (portable.keys, portable.values):
        tensor.copy_(torch.randn_like(tensor))
    native = NativeLatentLayout().fused(portable)
    native.keys.copy_(torch.cat([portable.keys, portable.values], dim=-1)[0, :, :, None])
    rotation = Rotation(0, pairs, tensor="values")
    numbers = [torch.tensor([number]) for number in (SLOTS, PROTECTED, count)]
    for layer in (portable, native):
        moved = in_layout(rotation, layer, latent)
        assert ShiftModule(ExportableCache([layer]), [moved], [torch.full((pairs,), 0.3)])(*numbers)[0] == 29
    expected = torch.cat([portable.keys, portable.values], dim=-1)[0, 0, : SLOTS - count]
    torch.testing.assert_close(native.keys[0, : SLOTS - count, 0], expected)


def test_rows_move_together_and_compiled_steps_go_on() -> None:
    """Check two rows of a batch, a fork, and compiled steps after a shift."""
    model = hybrid_model()
    ids = tokens(60, batch_size=2)
    oracles = [ShiftOracle(model) for _ in range(2)]
    cache = ExportableCache.from_model(model, SLOTS, batch_size=2)
    with Session.from_model(model, cache, compile="wait", prefill_chunk=1) as session:
        before = session.prefill(ids[:, :30])
        expected = torch.cat([one.feed(ids[row : row + 1, :30]) for row, one in enumerate(oracles)])
        torch.testing.assert_close(before, expected, atol=5e-5, rtol=0)
        fork = session.fork()
        session.shift(15, PROTECTED)
        for one in oracles:
            one.drop(15, PROTECTED)
        for column in range(30, 34):
            token = ids[:, column]
            expected = torch.cat([one.feed(token[row].view(1, 1)) for row, one in enumerate(oracles)])
            torch.testing.assert_close(session.decode(token), expected, atol=5e-5, rtol=0)
        assert fork.length.tolist() == [30, 30]
        fork.shift(2)
        assert session.length.tolist() == [19, 19]


def test_a_generation_past_a_border_of_rope_rotates_what_a_shift_brought_back() -> None:
    """Check a model that transformers computes again at the border: after a shift, its keys are rotated instead."""
    family, fields = ROPES["longrope phi3"]
    model, slots, border, prompt = tiny_model(family, **fields), 24, 16, tokens(9)
    model.generation_config.eos_token_id = None
    with Session.from_model(model, ExportableCache.from_model(model, slots)) as session:
        generated = list(session.generate(prompt, 40, on_full="shift", protected=PROTECTED))
        oracle, fed, crossings = ShiftOracle(model), prompt[0].tolist(), 0
        logits = oracle.feed(prompt)
        for token in generated[:-1]:
            assert float(logits.max() - logits[0, token]) < 1e-4
            if oracle.length == slots:
                oracle.drop((slots - PROTECTED) // 2, PROTECTED)
            held, fed = oracle.length, [*fed, token]
            crossings += held == border
            if held == border and len(fed) == border + 1:
                oracle = ShiftOracle(model)
                logits = oracle.feed(torch.tensor([fed]))
                continue
            if held == border:
                oracle.drop(0, 0, reaching=border + 1)
            logits = oracle.feed(torch.tensor([[token]]))
        assert crossings == 4


@pytest.mark.parametrize("kind", ["dynamic llama", "longrope llama"])
def test_states_of_rows_past_a_border_of_rope_shift_after_they_were_saved(kind: str, tmp_path: Path) -> None:
    """Check that a file tells which keys have which factors, and that rows fed from elsewhere are refused."""
    model = tiny_model(ROPES[kind][0], **ROPES[kind][1])
    oracle, ids = ShiftOracle(model), tokens(40)
    with _session(model) as session:
        for start, end in ((0, 10), (10, 20), (20, 21), (21, 30)):
            session.prefill(ids[:, start:end])
            oracle.feed(ids[:, start:end])
        session.save_state(tmp_path / "state")
        session.reset()
        session.load_state(tmp_path / "state")
        session.shift(7, 3)
        oracle.drop(7, 3)
        torch.testing.assert_close(session.decode(ids[0, 30:31]), oracle.feed(ids[:, 30:31]), atol=5e-5, rtol=0)
        # As files of earlier releases, and damaged.
        name = "rope.written.0"
        with safe_open(tmp_path / "state", "pt") as file:
            saved, metadata = {one: file.get_tensor(one) for one in file.keys()}, file.metadata()
        del metadata["checksum"]
        write_tensors(tmp_path / "old", {one: tensor for one, tensor in saved.items() if one != name}, metadata)
        session.load_state(tmp_path / "old")
        with pytest.raises(InputError, match="row 0 must hold tokens that the session has been fed, to shift"):
            session.shift(2)
        for wrong in (saved[name][:5], saved[name][0], saved[name] - 100, saved[name].float()):
            write_tensors(tmp_path / "wrong", {**saved, name: wrong.clone()}, metadata)
            with pytest.raises(BundleError, match="lengths of a row's keys must be"):
                session.load_state(tmp_path / "wrong")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", pytest.param("qwen3_vl", marks=pytest.mark.full)])
def test_images_are_dropped_whole_and_move_with_their_text(family: str) -> None:
    """Check shifts before, of and after images, whose rotary positions are fewer than their tokens in two families."""
    kind, tokens_of_item, options = FAMILIES[family]
    model, cache = tiny_multimodal(family), {"max_cache_len": 64}
    inputs = multimodal_prompt(model, 2, 24, tokens_of_item, start=10, apart=5)
    items = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
    ids, oracle = tokens(20), ShiftOracle(model)
    with Session.from_model(model, ExportableCache.from_model(model, **cache), modalities=[kind], **options) as session:
        pairs = [(session.prefill(**inputs), oracle.feed(inputs["input_ids"], **items))]
        for name, count, first in (("first \\+ count", 8, 4), ("first", 20, 12)):
            with pytest.raises(InputError, match=f"{name} must not be inside .* 10 to {9 + tokens_of_item}, got 12"):
                session.shift(count, first)
        # Text before both images, the first image and text after it, and text after the images.
        for count, first in ((3, 2), (tokens_of_item + 3, 7), (4, 9 + tokens_of_item)):
            session.shift(count, first)
            oracle.drop(count, first)
            token = ids[:, len(pairs) : len(pairs) + 1]
            pairs.append((session.decode(token[0]), oracle.feed(token)))
        assert [image.start for image in session.stepper.state.images.rows[0]] == [9]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    # Past both images, up to the first one, and none without a cut.
    [(1, 20, 1), (5, 20, 8), (5, 7, 2), (9, 20, 9), (12, 20, 14), (12, 13, 10), (3, 1, 2), (8, 20, 8)],
)
def test_a_generation_drops_whole_images(count: int, most: int, expected: int) -> None:
    """Check the number of dropped tokens from position 4 on, with images of 6 tokens at 6 and of 4 at 14."""
    state = SequenceState.empty(1)
    state = replace(state, images=PlacedImages(((Placed(6, 12), Placed(14, 18)),)))
    assert state.whole_drop(4, count, most) == expected


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gemma3, two bases", "pt2"),
        pytest.param("gemma3, two bases", "executorch", marks=pytest.mark.full),
        pytest.param("longrope phimoe", "pt2", marks=pytest.mark.full),
        pytest.param("dynamic llama", "pt2", marks=pytest.mark.full),
    ],
)
def test_programs_shift_as_their_models_do(name: str, target: str, tmp_path: Path) -> None:
    """Check the method of a program over full layers and rings or past a border of RoPE, and a program without it."""
    model = _model(name)
    bundle = export(model, target, SLOTS, tmp_path / "with", verify=False, shift=True, prefill_chunk=8)
    session = load(bundle.path)
    assert "shift" in bundle.manifest.program.methods
    assert _difference(session, ShiftOracle(model), shifts=4) < 5e-5
    with pytest.raises(InputError, match="count must be at most"):
        session.shift(SLOTS)
    del session.runner.methods["shift"]
    with pytest.raises(InputError, match="has no method shift, .* export it with shift=True"):
        session.shift(4)


def _teacher_forced(oracle: ShiftOracle, prompt: torch.Tensor, generated: list[int], held: int = 0) -> int:
    """Compare greedy tokens with the model that gets the same tokens, and drops half when it is full; count drops."""
    dropped = 0
    most = SLOTS - PROTECTED - WINDOW + 1
    if held + prompt.shape[1] > SLOTS:
        count = min(most, max(held + prompt.shape[1] - SLOTS, (held - PROTECTED) // 2))
        oracle.drop(count, PROTECTED)
        dropped += 1
    logits = oracle.feed(prompt)
    for token in generated:
        assert float(logits.max() - logits[0, token]) < 1e-4
        if oracle.length == SLOTS:
            oracle.drop(min(most, (SLOTS - PROTECTED) // 2), PROTECTED)
            dropped += 1
        logits = oracle.feed(torch.tensor([[token]]))
    return dropped


@pytest.mark.parametrize("options", [{}, pytest.param({"compile": "wait", "buckets": False}, marks=pytest.mark.full)])
def test_generations_shift_as_the_model_does(options: dict[str, Any]) -> None:
    """Check a generation past a full cache, and one whose prompt does not fit what is left."""
    model = tiny_model("gemma3_text")
    model.generation_config.eos_token_id = None
    oracle, prompt = ShiftOracle(model), tokens(9)
    with _session(model, **options) as session:
        first = list(session.generate(prompt, 60, on_full="shift", protected=PROTECTED))
        assert len(first) == 60 and _teacher_forced(oracle, prompt, first[:-1]) == 2
        held = int(session.length)
        assert held == oracle.length
        # The newest token is not held, so it begins the next prompt.
        more = torch.cat([torch.tensor([[first[-1]]]), tokens(SLOTS - held + 3)], dim=1)
        second = list(session.generate(more, on_full="shift", protected=PROTECTED))
        assert _teacher_forced(oracle, more, second[:-1], held) >= 1
        # Without a limit: half of the cache, or where it is full.
        assert len(second) >= SLOTS // 2 and session.length <= SLOTS


def test_generations_of_rows_shift_together() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    session = Session.from_model(model, ExportableCache.from_model(model, SLOTS, batch_size=2))
    prompt = tokens(9, batch_size=2)
    rows = torch.stack(list(session.generate(prompt, 60, on_full="shift", protected=3)), dim=1)
    for row in range(2):
        alone = _session(model).generate(prompt[row : row + 1], 60, on_full="shift", protected=3)
        assert rows[row].tolist() == list(alone)


def test_generations_that_cannot_shift_are_refused() -> None:
    session = _session(tiny_model("llama"))
    session.prefill(tokens(20))
    for options, message in (
        ({"on_full": "drop"}, "on_full must be one of refuse, shift, got 'drop'"),
        ({"on_full": "shift", "protected": 21}, "protected must be from 0 to 20, half of a cache of 40 tokens, got 21"),
        ({"on_full": "shift", "protected": True}, "protected must be from 0 to 20"),
        ({"on_full": "shift", "draft": PromptLookup()}, "on_full must be 'refuse' with a draft"),
    ):
        with pytest.raises(InputError, match=message):
            session.generate(tokens(3), **options)
    # 16 of the held tokens can be dropped, and 20 are free.
    with pytest.raises(CacheFullError, match="the cache holds 20 of at most 40 tokens, 37 more do not fit"):
        session.generate(tokens(37), 1, on_full="shift")
    assert len(list(session.generate(tokens(36), 1, on_full="shift"))) == 1 and session.length == SLOTS
    with pytest.raises(UnsupportedModelError):
        _session(tiny_model("gpt2")).generate(tokens(3), on_full="shift")
