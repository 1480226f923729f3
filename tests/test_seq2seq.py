"""Encoder-decoder models: sessions over every form against eager `EncoderDecoderCache`; where cross-attention is
computed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache, PreTrainedModel

from exportable_cache import ExportableCache, Session, export
from exportable_cache.errors import InputError
from exportable_cache.models.cache_factory import ExportableEncoderDecoderCache
from exportable_cache.models.layers.encoder import encoder_of
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.verification.compare import compare
from exportable_cache.verification.prompts import random_text
from exportable_cache.verification.spec import VerifySpec

from .support.models import among, tokens
from .support.seq2seq import encoder_inputs, reference_logits, tiny_seq2seq
from .support.sessions import lowered_session
from .zoo.architectures import architectures
from .zoo.build import tiny_model as zoo_model
from .zoo.media import media_rows, tiny_media_model

TOLERANCE = 1e-4
MAX_CACHE_LEN = 48
STEPS = 20
#: Longest encoder input, and the lengths tried: tokens, or samples.
ENCODER = {"moonshine": (8000, (3000, 8000)), "whisper": (24, (24,))}


def sizes(family: str) -> tuple[int, tuple[int, ...]]:
    return ENCODER.get(family, (20, (3, 20, 1)))


def live(model: PreTrainedModel, family: str, batch_size: int = 1, **options: Any) -> Session:
    cache = ExportableCache.from_model(model, MAX_CACHE_LEN, batch_size, max_encoder_len=sizes(family)[0])
    return Session.from_model(model, cache, prefill_chunk=16, **options)


def largest_difference(
    session: Session, model: PreTrainedModel, family: str, prompts: tuple[int, ...] = (1, 4)
) -> float:
    """Over encoder inputs of several lengths, with a prompt of one of these lengths each, and 20 steps after it."""
    differences, lengths = [], sizes(family)[1]
    for index, length in enumerate(lengths):
        inputs = encoder_inputs(model, length, session.batch_size, seed=index)
        ids = tokens(STEPS + prompts[-1], session.batch_size, seed=index)
        for prompt in prompts if len(lengths) == 1 else prompts[index % len(prompts) :][:1]:
            expected = reference_logits(model, inputs, ids, prompt)
            model.set_attn_implementation("exportable_cache")
            session.encode(**inputs)
            rows = [session.prefill(ids[:, :prompt])]
            rows += [session.decode(ids[:, position]) for position in range(prompt, ids.shape[1])]
            differences.append((torch.stack(rows, 1) - expected).abs().max().item())
    return max(differences)


@pytest.mark.parametrize(
    "family",
    "t5 mt5 umt5 longt5 bart marian pegasus pegasus_x m2m_100 mbart blenderbot blenderbot-small plbart mvp "
    "bigbird_pegasus switch_transformers whisper moonshine".split(),
)
def test_eager_sessions_equal_the_model(family: str) -> None:
    model = tiny_seq2seq(family)
    assert largest_difference(live(model, family), model, family) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "form"),
    [
        pytest.param("t5", "resident", marks=pytest.mark.full),
        ("bart", "explicit"),
        # Sound, features of fixed length, and blocks: below, and in test_seq2seq_bundle.py and test_encoder_inputs.py.
        pytest.param("moonshine", "resident", marks=pytest.mark.full),
        pytest.param("whisper", "resident", marks=pytest.mark.full),
        pytest.param("longt5", "resident", marks=pytest.mark.full),
        pytest.param("pegasus_x", "resident", marks=pytest.mark.full),
    ],
)
def test_pt2_programs_equal_the_model(family: str, form: str) -> None:
    model = tiny_seq2seq(family)
    session = lowered_session(model, "pt2", MAX_CACHE_LEN, max_encoder_len=sizes(family)[0], form=form)
    assert largest_difference(session, model, family) <= TOLERANCE


# A T5 whose cross-attention has no bias: of its decode step the length of the source is a constant to Inductor.
@pytest.mark.full
def test_machine_code_is_verified(tmp_path: Path) -> None:
    model = zoo_model(next(row for row in architectures() if row.name == "seq2seq-t5"))
    bundle = export(model, target="aoti", max_cache_len=24, prefill_chunk=8, output_dir=tmp_path / "b")
    assert bundle.manifest.verification["max_difference"] <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_executorch_programs_equal_the_model(family: str) -> None:
    model = tiny_seq2seq(family)
    session = lowered_session(model, "executorch", MAX_CACHE_LEN, max_encoder_len=sizes(family)[0])
    assert largest_difference(session, model, family, prompts=(4,)) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("family", ["t5", "marian", "whisper"])
def test_quantised_layers_are_exported_whole_and_verified(family: str, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    encoder_len = sizes(family)[0]
    bundle = export(
        tiny_seq2seq(family),
        "executorch",
        MAX_CACHE_LEN,
        tmp_path / "out",
        max_encoder_len=encoder_len,
        quantize="8da4w",
    )
    verification = bundle.manifest.verification
    assert verification is not None and verification["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "whisper", "longt5"])
def test_compiled_sessions_equal_the_model(family: str) -> None:
    model = tiny_seq2seq(family)
    assert largest_difference(live(model, family, compile=True), model, family) <= TOLERANCE


@pytest.mark.parametrize("target", among(["eager", "pt2"], fast=["eager"]))
def test_blocks_with_global_tokens_equal_the_model(target: str) -> None:
    model = tiny_seq2seq("longt5", encoder_attention_type="transient-global", global_block_size=6)
    if target == "eager":
        session = live(model, "longt5")
    else:
        session = lowered_session(model, target, MAX_CACHE_LEN, max_encoder_len=20)
    assert session.runner.methods["encode"].multiple == 12
    assert largest_difference(session, model, "longt5") <= TOLERANCE


def test_the_longest_text_by_default_fits_the_encoders_table() -> None:
    """M2M100's table is a buffer that grows, which failed to trace; Florence-2's config has it with its decoder."""
    florence = tiny_media_model(next(row for row in media_rows() if row.model_type == "florence2"))
    for model in (tiny_seq2seq("m2m_100"), florence):
        assert encoder_of(model).max_length == 256
        with pytest.raises(InputError, match="must be at most 256, the positions of the encoder"):
            encoder_of(model, 257)


def test_text_is_padded_to_whole_blocks_of_the_encoder() -> None:
    model = tiny_seq2seq("longt5")
    cache = ExportableCache.from_model(model, MAX_CACHE_LEN, max_encoder_len=9)
    session = Session.from_model(model, cache, prefill_chunk=16)
    assert (session.runner.methods["encode"].multiple, session.runner.methods["encode"].max_length) == (4, 12)
    for length in (1, 4, 7, 12):
        hidden = session.encode(**encoder_inputs(model, length))
        assert hidden.shape[1] == max(8, -(-length // 4) * 4) and session.stepper.state.encoded[1].tolist() == [length]
    with pytest.raises(InputError, match="must have a length of 1 to 12, got 13"):
        session.encode(**encoder_inputs(model, 13))


@pytest.mark.parametrize("family", ["t5", "bart", "moonshine", "longt5"])
def test_padded_rows_equal_the_rows_alone(family: str) -> None:
    model = tiny_seq2seq(family)
    longest, lengths = sizes(family)
    inputs = encoder_inputs(model, longest, 2)
    if family == "moonshine":
        pytest.skip("its encoder normalises over time, so padding changes the real part")
    inputs["attention_mask"][1, lengths[0] :] = 0
    session = live(model, family, batch_size=2)
    session.encode(**inputs)
    ids = tokens(12, 2)
    rows = [session.prefill(ids[:, :3])] + [session.decode(ids[:, position]) for position in range(3, 12)]
    alone = {name: tensor[1:, : lengths[0]] for name, tensor in inputs.items()}
    expected = reference_logits(model, alone, ids[1:], 3)
    assert (torch.stack(rows, 1)[1:] - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "projections"),
    [
        ("t5", (".EncDecAttention.k.", ".EncDecAttention.v.")),
        pytest.param("whisper", ("encoder_attn.k_proj.", "encoder_attn.v_proj."), marks=pytest.mark.full),
    ],
)
def test_cross_attention_is_projected_in_prefill_only(family: str, projections: tuple[str, str]) -> None:
    model = tiny_seq2seq(family, **({"num_layers": 1, "num_decoder_layers": 1} if family == "t5" else {}))
    cache = ExportableCache.from_model(model, MAX_CACHE_LEN, max_encoder_len=sizes(family)[0])
    program = Program(model, cache, ProgramSpec(16))
    layers = model.config.decoder_layers if family == "whisper" else model.config.num_decoder_layers
    counts = {}
    for name in program.methods:
        exported = program.export(name)
        weights = exported.graph_signature.inputs_to_parameters
        used = [
            weights[node.name]
            for node in exported.graph.nodes
            if node.op == "placeholder"
            and node.name in weights
            and node.users
            and weights[node.name].endswith("weight")
        ]
        counts[name] = sum(any(part in weight for part in projections) for weight in used)
    assert counts == {"encode": 0, "prefill": 2 * layers, "decode": 0}


def test_the_encoder_input_matters() -> None:
    model = tiny_seq2seq("t5")
    ids = tokens(6)
    first, second = (reference_logits(model, encoder_inputs(model, 9, seed=seed), ids, 1) for seed in (0, 1))
    assert (first - second).abs().amax(dim=-1).min() > 0.05


def test_layers_come_from_the_models_own_run() -> None:
    model = tiny_seq2seq("t5")
    cache = ExportableCache.from_model(model, 32, batch_size=2, max_encoder_len=10)
    assert isinstance(cache, ExportableEncoderDecoderCache) and isinstance(cache, EncoderDecoderCache)
    assert [layer.label for layer in cache.layers] == ["full"] * 3 + ["cross"] * 3
    assert cache.layers[3].keys.shape == (2, 4, 10, 8) and cache.layers[0].keys.shape == (2, 4, 32, 8)
    assert len(cache) == 3 and cache.max_length == 32


def test_a_model_that_was_given_a_cache_is_given_another() -> None:
    """T5Gemma 2 attends over its own and the encoder's keys at once: under our attention, which the first cache
    switches it to, over a cache of transformers' that fails.
    """
    model = zoo_model(next(row for row in architectures() if row.model_type == "t5gemma2"))
    first, second = (ExportableCache.from_model(model, 32, max_encoder_len=16) for _ in range(2))
    shapes = [[(name, tensor.shape) for name, tensor in cache.named_state()] for cache in (first, second)]
    assert shapes[0] == shapes[1]
    assert model.config._attn_implementation == "exportable_cache"


def test_plain_transformers_use_goes_through_the_protocol() -> None:
    model = tiny_seq2seq("bart")
    inputs, ids = encoder_inputs(model, 7), tokens(10)
    expected = reference_logits(model, inputs, ids, 2)
    cache = ExportableCache.from_model(model, 32, max_encoder_len=20)
    with torch.no_grad():
        outputs = model.get_encoder()(**inputs)
        rows = [model(encoder_outputs=outputs, decoder_input_ids=ids[:, :2], past_key_values=cache).logits[:, -1]]
        assert cache.is_updated == {0: True, 1: True, 2: True} and cache.cross_layers[0].encoder_length.tolist() == [7]
        for position in range(2, 10):
            step = ids[:, position : position + 1]
            rows.append(model(encoder_outputs=outputs, decoder_input_ids=step, past_key_values=cache).logits[:, -1])
    assert (torch.stack(rows, 1) - expected).abs().max() <= TOLERANCE
    cache.crop(-1)
    assert cache.cumulative_length.tolist() == [9] and cache.cross_layers[0].encoder_length.tolist() == [7]
    cache.reset()
    assert cache.is_updated == {0: False, 1: False, 2: False}


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_plain_use_goes_on_from_a_sessions_cache(family: str) -> None:
    """Of 20 encoder slots 7 are written: the model reads those, and computes none of them again."""
    model = tiny_seq2seq(family)
    inputs, ids = encoder_inputs(model, 7), tokens(6)
    expected = reference_logits(model, inputs, ids, 4)
    session = live(model, family)
    session.encode(**inputs)
    assert session.cache.is_updated == {0: False, 1: False, 2: False}
    session.prefill(ids[:, :4])
    cache = session.cache
    assert cache.is_updated == {0: True, 1: True, 2: True}
    kept = [layer.keys.clone() for layer in cache.cross_layers]
    with torch.no_grad():
        outputs = model.get_encoder()(**inputs)
        common = {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"], "past_key_values": cache}
        rows = [model(decoder_input_ids=ids[:, place : place + 1], **common).logits[:, -1] for place in (4, 5)]
    assert (torch.stack(rows, 1) - expected[:, 1:]).abs().max() <= TOLERANCE
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.cross_layers, kept, strict=True))
    session.reset()
    assert session.cache.is_updated == {0: False, 1: False, 2: False}


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny_seq2seq("bart")
    session = live(model, "bart")
    session.encode(**encoder_inputs(model, 5))
    session.prefill(tokens(3))
    session.cache.save(tmp_path / "cache.safetensors")
    loaded = ExportableCache.load(tmp_path / "cache.safetensors")
    assert isinstance(loaded, ExportableEncoderDecoderCache)
    assert loaded.cumulative_length.tolist() == [3] and loaded.cross_layers[0].encoder_length.tolist() == [5]


def answers(session: Session, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([session.decode(ids[:, position]) for position in range(ids.shape[1])], 1)


@pytest.mark.parametrize("target", among(["eager", "pt2"], fast=["eager"]))
def test_a_fork_goes_on_by_itself(target: str) -> None:
    model = tiny_seq2seq("bart")
    if target == "eager":
        session = live(model, "bart")
    else:
        session = lowered_session(model, "pt2", MAX_CACHE_LEN, max_encoder_len=20)
    ids, other = tokens(12), tokens(12, seed=5)
    inputs = encoder_inputs(model, 9), encoder_inputs(model, 5, seed=1)
    expected = [
        reference_logits(model, inputs[0], torch.cat([ids[:, :3], rest], 1), 3)[:, 1:]
        for rest in (ids[:, 3:], other[:, 3:])
    ]
    model.set_attn_implementation("exportable_cache")
    session.encode(**inputs[0])
    session.prefill(ids[:, :3])
    fork = session.fork()
    assert (answers(fork, other[:, 3:]) - expected[1]).abs().max() <= TOLERANCE
    # Another input of the one leaves the other's alone, its cross-attention and what its next prefill takes.
    fork.encode(**inputs[1])
    fork.prefill(ids[:, :3])
    assert (answers(session, ids[:, 3:]) - expected[0]).abs().max() <= TOLERANCE
    session.reset()
    session.prefill(ids[:, :3])
    assert (answers(session, ids[:, 3:]) - expected[0]).abs().max() <= TOLERANCE


def test_a_saved_session_goes_on_in_another(tmp_path: Path) -> None:
    model = tiny_seq2seq("bart")
    session, other = live(model, "bart"), live(model, "bart")
    ids = tokens(12)
    session.encode(**encoder_inputs(model, 9))
    session.prefill(ids[:, :3])
    session.save_state(tmp_path / "state.safetensors")
    expected = answers(session, ids[:, 3:])
    other.encode(**encoder_inputs(model, 4, seed=1))
    other.prefill(tokens(7, seed=2))
    other.load_state(tmp_path / "state.safetensors")
    assert other.length.tolist() == [3] and torch.equal(answers(other, ids[:, 3:]), expected)
    other.reset()
    other.prefill(ids[:, :3])
    assert torch.equal(answers(other, ids[:, 3:]), expected)


def test_reset_answers_the_same_input_anew_and_encode_starts_over() -> None:
    model = tiny_seq2seq("t5")
    session = live(model, "t5")
    session.encode(**encoder_inputs(model, 9))
    ids = tokens(4)
    first = session.prefill(ids)
    session.reset()
    assert torch.equal(session.prefill(ids), first)
    session.encode(**encoder_inputs(model, 4, seed=3))
    assert session.length.tolist() == [0]
    assert not torch.allclose(session.prefill(ids), first, atol=1e-2)


def test_one_decoder_token_at_position_0_is_a_prefill() -> None:
    model = tiny_seq2seq("t5")
    session, other = live(model, "t5"), live(model, "t5")
    inputs, ids = encoder_inputs(model, 9), tokens(3)
    for each in (session, other):
        each.encode(**inputs)
    assert torch.equal(session.prefill(ids[:, :1]), other.decode(ids[:, 0]))


def test_generate_equals_the_models_own() -> None:
    model = tiny_seq2seq("bart")
    inputs = encoder_inputs(model, 9)
    start = torch.tensor([[model.config.decoder_start_token_id]])
    # BART's own settings force an end.
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False, num_beams=1)[0, 1:].tolist()
    session = live(model, "bart")
    session.encode(**inputs)
    assert list(session.generate(start, max_new_tokens=12)) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda session: session.prefill(tokens(3)), "call session.encode"),
        (lambda session: session.generate(tokens(3)), "call session.encode"),
        (lambda session: session.encode(tokens(21)), "must have a length of 1 to 20"),
        (lambda session: session.encode(input_features=tokens(3)), "encode takes input_ids"),
        (lambda session: session.encode(tokens(3), attention_mask=torch.tensor([[0, 1, 1]])), "pad on the right"),
        (lambda session: session.encode(tokens(3).int()), "must be torch.int64"),
    ],
)
def test_refused_calls(call: Any, message: str) -> None:
    session = live(tiny_seq2seq("t5"), "t5")
    with pytest.raises(InputError, match=message):
        call(session)


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_keys_in_8_bits_are_those_of_self_attention(family: str) -> None:
    """Keys of cross-attention stay as the model writes them, so `--recipe fast` fits; verification rounds alike."""
    model, (most, _) = tiny_seq2seq(family), sizes(family)
    cache = ExportableCache.from_model(model, MAX_CACHE_LEN, max_encoder_len=most, kv_dtype="int8")
    assert {(layer.label, layer.storage.rounds) for layer in cache.layers} == {("full int8", True), ("cross", False)}
    session = Session.from_model(model, cache, prefill_chunk=16)
    report = compare(session, model, VerifySpec(prompts=(5,), decode_steps=STEPS))
    assert report.passed and report.rounding is not None, report
    assert report.rounding.effect > max(10 * TOLERANCE, 4 * report.max_difference), report


def test_verification_feeds_no_padding() -> None:
    """M2M100 counts positions without it in each call, so that its own logits depend on where a prompt is cut."""
    model = zoo_model(next(row for row in architectures() if row.model_type == "m2m_100"))
    cache = ExportableCache.from_model(model, 64, max_encoder_len=9)
    session = Session.from_model(model, cache, prefill_chunk=64)
    text = random_text(session, 500, torch.Generator().manual_seed(0))
    assert model.config.pad_token_id in text
    assert model.config.pad_token_id not in random_text(session, 500, torch.Generator(), model.config.pad_token_id)
    assert compare(session, model).passed


def test_refused_allocations() -> None:
    with pytest.raises(
        InputError, match="max_encoder_len must be 24, the frames that the encoder of Whisper.* takes, got 30"
    ):
        ExportableCache.from_model(tiny_seq2seq("whisper"), 16, max_encoder_len=30)
    with pytest.raises(InputError, match="at most 256, the positions of the encoder"):
        ExportableCache.from_model(tiny_seq2seq("bart"), 16, max_encoder_len=257)


@pytest.mark.parametrize("family", ["bart", "moonshine"])
def test_warm_up_runs_the_encoder_and_the_steps(family: str) -> None:
    model = tiny_seq2seq(family)
    session, called = live(model, family), set()
    run = session.runner.run
    session.runner.run = lambda name, *inputs: (called.add(name), run(name, *inputs))[1]
    session.warm_up()
    assert called == {"encode", "prefill", "decode"}
    assert session.length.tolist() == [0]
    assert not any(tensor.any() for tensor in session.runner.state.values())
    with pytest.raises(InputError, match="the encoder has not run yet"):
        session.prefill(tokens(2))
    assert largest_difference(session, model, family) <= TOLERANCE
