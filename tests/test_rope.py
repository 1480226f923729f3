"""RoPE whose factors change with the length: every kind, below, across and past its border, by every way there.

`prefill`, `decode`, `score` and `rewind` have to give what `DynamicCache` gives when it is fed the same calls.
`generate`, and what is made of it, has to give what `model.generate` gives. The model of the oracle is a copy for each
sequence, because dynamic NTK keeps the longest length on the module.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.bundle.manifest import Manifest
from exportable_cache.decoding import Completer, CompletionOptions, ContinuousBatch, PromptLookup, beam_search
from exportable_cache.errors import InputError
from exportable_cache.models.patches.mechanisms.rope import fix_rope
from exportable_cache.models.positions import rope_rule
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.verification.verify import verify

from .support.models import among, tiny_model, tokens
from .support.multimodal import prompt as multimodal_prompt
from .support.multimodal import reference_logits as multimodal_reference
from .support.multimodal import tiny_multimodal
from .support.shifted import ShiftOracle

BORDER, SLOTS, CHUNK = 16, 48, 8
TOLERANCE = 2e-5

_THETA = {"rope_theta": 1e4}
_ORIGINAL = {"original_max_position_embeddings": BORDER}
_LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.0, 1.1, 1.2], "long_factor": [1.5, 4.0, 16.0, 40.0],
    **_ORIGINAL, **_THETA,
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **_THETA}
_DEFAULT = {"rope_type": "default", **_THETA}
#: Model types and what their configs say, by kind; those behind "static" have the same factors at every length.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope phi3": ("phi3", {"rope_parameters": _LONG, "sliding_window": None, **_ORIGINAL}),
    "longrope phimoe": (
        "phimoe",
        {
            "rope_parameters": {**_LONG, "short_mscale": 1.1, "long_mscale": 1.4},
            "num_local_experts": 4, "num_experts_per_tok": 2, **_ORIGINAL,
        },
    ),
    "longrope llama": ("llama", {"rope_parameters": _LONG}),
    "longrope gemma3": (
        "gemma3_text",
        {
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"full_attention": _LONG, "sliding_attention": _DEFAULT},
        },
    ),
    "dynamic llama": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": BORDER}),
    "dynamic gemma3": (
        "gemma3_text",
        {
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"full_attention": _DYNAMIC, "sliding_attention": _DEFAULT},
            "max_position_embeddings": BORDER,
        },
    ),
    "dynamic cohere": (
        "cohere",
        {"rope_parameters": _DYNAMIC, "max_position_embeddings": BORDER, "logit_scale": 1.0},
    ),
    "static linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **_THETA}}),
    "static yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **_ORIGINAL, **_THETA}}),
    "static llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                **_ORIGINAL, **_THETA,
            }
        },
    ),
    "static proportional": (
        "llama",
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0, **_THETA}},
    ),
}  # fmt: skip
CHANGING = [kind for kind in KINDS if not kind.startswith("static")]
#: One of each: computed again by `generate`, changing once, changing with every token.
EACH = ["longrope phi3", "longrope llama", "dynamic llama"]
IDS = tokens(SLOTS, seed=1)[0].tolist()


def model_of(kind: str, layers: int = 2) -> PreTrainedModel:
    family, fields = KINDS[kind]
    # Copied, as configs write into what they are given.
    fields = copy.deepcopy({**fields, "eos_token_id": None, "num_hidden_layers": layers})
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    model = tiny_model(family, **fields)
    model.generation_config.eos_token_id = None
    return model


def session_of(model: PreTrainedModel, rows: int = 1, **options: Any) -> Session:
    cache = ExportableCache.from_model(model, SLOTS, batch_size=rows)
    return Session.from_model(model, cache, **{"prefill_chunk": CHUNK, **options})


class Oracle:
    """A copy of a model over `DynamicCache`, fed one sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("eager")
        self.cache = DynamicCache()

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [length, vocab]."""
        start = self.cache.get_seq_length()
        positions = torch.arange(start, start + len(ids))[None]
        return self.model(torch.tensor([list(ids)]), past_key_values=self.cache, position_ids=positions).logits[0]

    def rewind(self, count: int) -> None:
        self.cache.crop(-count)


def generated(model: PreTrainedModel, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    oracle = Oracle(model).model
    ids = oracle.generate(torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, **options)
    return ids[0, len(prompt) :].tolist()


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_calls_give_what_dynamic_cache_gives(kind: str) -> None:
    """Prompts below, to, across and past the border, in chunks; tokens; and back, once by a little and once by all."""
    model = model_of(kind)
    session = session_of(model, score_length=4)
    for prompt in (BORDER - 4, BORDER, BORDER + 1, BORDER + 9):
        session.reset()
        oracle = Oracle(model)
        near(session.prefill(torch.tensor([IDS[:prompt]]))[0], oracle.feed(IDS[:prompt])[-1])
        for token in IDS[prompt : prompt + 6]:
            near(session.decode(torch.tensor([token]))[0], oracle.feed([token])[-1])
        # Back: past the border, to its other side, and on from there as far as the token after it.
        for back, length in ((2, 1), (prompt - BORDER + 7, 1), (0, 3), (0, 2), (0, 3), (0, 9)):
            session.rewind(back)
            if back:
                oracle.rewind(back)
            held = int(session.length)
            fed = IDS[held + 1 : held + 1 + length]
            near(session.prefill(torch.tensor([fed]))[0], oracle.feed(fed)[-1])
        near(session.score(torch.tensor([IDS[:4]]))[0], oracle.feed(IDS[:4]))


@pytest.mark.parametrize("kind", CHANGING)
def test_the_factors_differ_past_the_border(kind: str) -> None:
    """Or nothing here would show a mistake."""
    oracle = Oracle(model_of(kind))
    parts = [oracle.feed(IDS[:BORDER]), *(oracle.feed([token]) for token in IDS[BORDER : BORDER + 8])]
    at_once = Oracle(model_of(kind)).feed(IDS[: BORDER + 8])
    assert (torch.cat(parts) - at_once).abs().max() > 0.02


@pytest.mark.parametrize("prompt", [BORDER - 5, BORDER, BORDER + 1])
@pytest.mark.parametrize("kind", among(KINDS, [*EACH, "longrope phimoe"]))
def test_generate_gives_what_transformers_gives(kind: str, prompt: int) -> None:
    model = model_of(kind)
    assert list(session_of(model).generate(torch.tensor([IDS[:prompt]]), 14)) == generated(model, IDS[:prompt], 14)


@pytest.mark.parametrize("kind", ["longrope phi3", "longrope phimoe"])
def test_generate_goes_on_across_the_border(kind: str) -> None:
    """A prompt that gets there from what the session holds, also after a rewind, and from a state on disk."""
    model = model_of(kind)
    first, then = IDS[: BORDER - 6], IDS[20:31]
    session = session_of(model)
    for back in (0, 5):
        session.reset()
        answer = list(session.generate(torch.tensor([first]), 4))
        session.rewind(back)
        held = [*first, *answer[:-1]][: int(session.length)]
        assert list(session.generate(torch.tensor([then]), 9)) == generated(model, [*held, *then], 9)
    # And back from the other side, on to it a second time.
    session.rewind(int(session.length) - BORDER + 3)
    assert list(session.generate(torch.tensor([then]), 9)) == generated(model, [*held, *then][: BORDER - 3] + then, 9)


@pytest.mark.parametrize("kind", EACH)
def test_a_saved_state_and_a_fork_go_on_across_the_border(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    session, expected = session_of(model), generated(model, IDS[:12], 14)
    answer = session.generate(torch.tensor([IDS[:12]]), 3)
    assert list(answer) == expected[:3]
    session.save_state(tmp_path / "state")
    fork, other = session.fork(), session_of(model)
    other.load_state(tmp_path / "state")
    for one in (session, fork, other):
        assert list(one.generate(torch.tensor([expected[2:3]]), 11)) == expected[3:]


def test_generate_past_the_border_from_tokens_that_are_not_known_is_refused() -> None:
    """A cache that something else has filled: what is in it cannot be computed again."""
    model = model_of("longrope phi3")
    cache = ExportableCache.from_model(model, SLOTS)
    with torch.no_grad():
        model(torch.tensor([IDS[:10]]), past_key_values=cache)
    session = Session.from_model(model, cache)
    with pytest.raises(InputError, match=r"row 0 must hold tokens that the session has been fed, got 10 .*LongRoPE"):
        list(session.generate(torch.tensor([IDS[10:20]]), 3))
    assert session.length.tolist() == [10]
    session.decode(torch.tensor([5]))


@pytest.mark.parametrize("kind", CHANGING)
def test_a_row_of_a_batch_gives_what_it_gives_alone(kind: str) -> None:
    """Rows below, at and past the border, as one prompt with padding, then token by token across it."""
    model = model_of(kind)
    lengths = (5, BORDER - 1, BORDER + 10)
    session = session_of(model, rows=3)
    prompts = [torch.tensor(IDS[:length]) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
    oracles = [Oracle(model) for _ in lengths]
    expected = [oracle.feed(IDS[:length])[-1] for oracle, length in zip(oracles, lengths, strict=True)]
    near(session.prefill(ids, attention_mask=mask), torch.stack(expected))
    for step in range(13):
        token = IDS[step]
        expected = [oracle.feed([token])[-1] for oracle in oracles]
        near(session.decode(torch.full((3,), token)), torch.stack(expected))
    # A row that waits keeps what it holds, and its factors.
    expected = [oracles[0].feed(IDS[3:5])[-1], oracles[1].feed(IDS[3:12])[-1], oracles[2].feed([IDS[3]])[-1]]
    near(session.prefill(pad(IDS[3:5], IDS[3:12], IDS[3:4]), attention_mask=masks(2, 9, 1)), torch.stack(expected))


def pad(*rows: list[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def masks(*lengths: int) -> torch.Tensor:
    return pad(*([1] * length for length in lengths))


@pytest.mark.parametrize("kind", among(CHANGING, EACH))
def test_rows_are_generated_as_alone(kind: str) -> None:
    """They cross the border in different steps, and one ends at it while the others go on."""
    model = model_of(kind)
    prompts = [IDS[:5], IDS[: BORDER - 2], IDS[: BORDER + 4]]
    expected = [generated(model, prompt, 16) for prompt in prompts]
    rows = torch.stack(list(session_of(model, rows=3).generate(prompts, 16)), dim=1)
    assert rows.tolist() == expected
    stop = expected[1][2]
    ends = [(answer.index(stop) + 1 if stop in answer else 16) for answer in expected]
    rows = torch.stack(list(session_of(model, rows=3).generate(prompts, 16, stop=[stop])), dim=1)
    for row, answer, end in zip(rows.tolist(), expected, ends, strict=True):
        assert row[:end] == answer[:end]


@pytest.mark.parametrize("kind", among(CHANGING, EACH))
def test_continuous_batch(kind: str) -> None:
    model = model_of(kind)
    batch = ContinuousBatch.from_model(model, SLOTS, 2, prefill_chunk=CHUNK)
    prompts = [IDS[: BORDER + 9], IDS[:5], IDS[: BORDER - 1]]
    requests = [batch.submit(torch.tensor([prompt]), 14) for prompt in prompts]
    list(batch.run())
    assert [request.tokens for request in requests] == [generated(model, prompt, 14) for prompt in prompts]


@pytest.mark.parametrize("kind", EACH)
def test_speculation(kind: str) -> None:
    """Prompts that repeat, so that proposals are made on both sides of the border and up to it."""
    model = model_of(kind)
    for prompt in (IDS[:5] * 2, IDS[:5] * 3, IDS[:6] * 3):
        session = session_of(model, score_length=8)
        got = list(session.generate(torch.tensor([prompt]), 20, draft=PromptLookup()))
        assert got == generated(model, prompt, 20)


class Known:
    """Proposes what is known to follow, so that all proposals are right."""

    max_tokens = 7

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def propose(self, context: Sequence[int], count: int, sampling: Any) -> Any:
        from exportable_cache.generation.speculative import Proposal

        return Proposal(self.text[len(context) : len(context) + count])


@pytest.mark.parametrize("kind", EACH)
def test_proposals_end_at_the_border(kind: str) -> None:
    model = model_of(kind)
    prompt = IDS[: BORDER - 4]
    expected = generated(model, prompt, 20)
    session = session_of(model, score_length=8)
    got = list(session.generate(torch.tensor([prompt]), 20, draft=Known([*prompt, *expected])))
    assert got == expected


@pytest.mark.parametrize("kind", EACH)
def test_beams(kind: str) -> None:
    model = model_of(kind)
    prompt = torch.tensor([IDS[: BORDER - 3]])
    found = beam_search(session_of(model, rows=3), prompt, 12)[0]
    options = {"num_beams": 3, "early_stopping": True, "output_scores": True, "return_dict_in_generate": True}
    expected = Oracle(model).model.generate(prompt, max_new_tokens=12, do_sample=False, **options)
    assert found.tokens == expected.sequences[0, BORDER - 3 :].tolist()
    assert abs(found.score - float(expected.sequences_scores)) < 1e-4


@pytest.mark.parametrize("kind", among(CHANGING, EACH))
def test_a_prefix_that_a_session_holds(kind: str) -> None:
    """The same request with every prefix before it: below, across and past the border, and back."""
    model = model_of(kind)
    words = Tokenizer(WordLevel({f"t{token}": token for token in range(128)}, unk_token="t0"))
    completer = Completer(session_of(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words)))
    reused = []
    for length in (BORDER - 6, BORDER - 2, BORDER + 8, BORDER + 12, BORDER - 4, BORDER - 1, BORDER + 2):
        completion = completer.complete(IDS[:length], CompletionOptions(max_new_tokens=4, alternatives=1))
        pieces = list(completion)
        expected = generated(model, IDS[:length], 4)
        assert [piece.token for piece in pieces] == expected
        first = Oracle(model).feed(IDS[:length])[-1].log_softmax(-1)[expected[0]]
        assert abs(pieces[0].logprob - float(first)) < 1e-4
        reused.append(completion.reused_tokens > 0)
    # Where the factors are those of the new prompt, the prefix is not computed again.
    again = rope_rule(model).recomputes
    assert reused == [False, True, again, kind.startswith("longrope"), False, True, again]


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("kind", EACH)
def test_a_prompt_after_a_shift_has_the_factors_of_its_length(kind: str, follows: bool) -> None:
    """Check kept tokens on one side of the border and their prompt on the other, after a shift and without one."""
    model, first, oracle = model_of(kind), 4, ShiftOracle(model_of(kind))
    words = Tokenizer(WordLevel({f"t{token}": token for token in range(128)}, unk_token="t0"))
    cache, tokenizer = ExportableCache.from_model(model, 24), PreTrainedTokenizerFast(tokenizer_object=words)
    completer = Completer(Session.from_model(model, cache, prefill_chunk=CHUNK, tokenizer=tokenizer))
    completer.use("shift", first)
    completer.feed(IDS[:22])
    # Ten tokens are dropped: of the 22 before eight others, or of a prompt that shares five with them.
    prompt = IDS[:30] if follows else [*IDS[:5], *IDS[10:31]]
    kept = [*prompt[:first], *prompt[first + 10 :]]
    held, logits = completer.feed(prompt)
    assert completer.dropped_tokens == 10 and int(completer.session.length) == len(kept)
    # Each length has other factors with dynamic NTK, so nothing is kept.
    assert held == (12 if follows and kind.startswith("longrope") else 0)
    if held:
        oracle.feed(torch.tensor([IDS[:22]]))
        oracle.drop(10, first, reaching=len(kept))
    torch.testing.assert_close(logits, oracle.feed(torch.tensor([kept[held:]])), atol=5e-5, rtol=0)


def test_a_state_of_a_larger_cache_shifts_below_the_border(tmp_path: Path) -> None:
    """Check a cache in which the factors do not change, loaded from one in which they do."""
    model, ids = model_of("longrope phi3"), torch.tensor([IDS])
    oracle, large = ShiftOracle(model), session_of(model)
    large.prefill(ids[:, :10])
    large.save_state(tmp_path / "state")
    small = Session.from_model(model, ExportableCache.from_model(model, BORDER))
    small.load_state(tmp_path / "state")
    small.prefill(ids[:, 10:13])
    small.shift(5, 2)
    oracle.feed(ids[:, :13])
    oracle.drop(5, 2)
    torch.testing.assert_close(small.decode(ids[0, 13:14]), oracle.feed(ids[:, 13:14]), atol=5e-5, rtol=0)


def test_an_answer_is_given_up_while_it_is_computed_again() -> None:
    """Between chunks, and the session answers the next prompt right: what was fed has the factors past the border."""
    model = model_of("longrope phi3")
    words = Tokenizer(WordLevel({f"t{token}": token for token in range(128)}, unk_token="t0"))
    session = session_of(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words))
    completer = Completer(session)
    completion = completer.complete(IDS[: BORDER - 1], CompletionOptions(max_new_tokens=8))
    next(completion), next(completion)
    run, lengths = session.runner.run, []

    def give_up(method: str, *inputs: torch.Tensor) -> Any:
        completion.give_up()
        lengths.append(inputs[0].shape[1])
        return run(method, *inputs)

    session.runner.run = give_up
    assert list(completion) == [] and lengths == [CHUNK] and session.length.tolist() == [CHUNK]
    session.runner.run = run
    pieces = list(completer.complete(IDS[: BORDER - 2], CompletionOptions(max_new_tokens=2)))
    assert [piece.token for piece in pieces] == generated(model, IDS[: BORDER - 2], 2)


def test_a_program_for_below_the_border_and_none_past_it() -> None:
    for kind in CHANGING:
        # Factors belong to the model, so one layer shows them.
        model = model_of(kind, layers=1)
        with pytest.raises(InputError, match=rf"max_cache_len must be at most {BORDER} .*(LongRoPE|NTK)"):
            Program(model, ExportableCache.from_model(model, SLOTS))
        session = ExportableCache.from_model(model, BORDER)
        program = Program(model, session, ProgramSpec(CHUNK))
        decode = program.export("decode").module()
        oracle = Oracle(model)
        for index, token in enumerate(IDS[:BORDER]):
            near(decode(torch.tensor([[token]]), torch.tensor([index]))[0], oracle.feed([token])[-1])


@pytest.mark.parametrize("kind", among(EACH, ["longrope phi3"]))
def test_a_program_across_the_border(kind: str, tmp_path: Path) -> None:
    """A bundle whose steps take the lengths: verified on both sides, and generating as the model does."""
    model = model_of(kind, layers=1)
    bundle = export(model, target="pt2", max_cache_len=SLOTS, prefill_chunk=CHUNK, output_dir=tmp_path / "x")
    assert any(prompt["length"] > BORDER for prompt in bundle.manifest.verification["prompts"])
    session = load(tmp_path / "x")
    assert session.stepper.rope == rope_rule(model)
    for prompt in (BORDER - 3, BORDER + 4):
        session.reset()
        oracle = Oracle(model)
        near(session.prefill(torch.tensor([IDS[:prompt]]))[0], oracle.feed(IDS[:prompt])[-1])
        for token in IDS[prompt : prompt + 6]:
            near(session.decode(torch.tensor([token]))[0], oracle.feed([token])[-1])
        session.reset()
        assert list(session.generate(torch.tensor([IDS[:prompt]]), 10)) == generated(model, IDS[:prompt], 10)
    fields = json.loads((tmp_path / "x" / "manifest.json").read_text())
    fields["program"]["rope"] = None
    with pytest.raises(ValueError, match="takes rope_lengths, but rope is missing"):
        Manifest.model_validate(fields)


@pytest.mark.parametrize("kind", CHANGING)
def test_fixed_factors_are_those_of_one_length(kind: str) -> None:
    """A copy has the factors of a long sequence at every position, and the model keeps its own."""
    model = model_of(kind, layers=1)
    fixed = fix_rope(model, SLOTS)
    assert rope_rule(fixed) is None and rope_rule(model) is not None
    assert fixed.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    # One call of the whole sequence, for which transformers chooses the factors of its length.
    whole, short = Oracle(model).feed(IDS), Oracle(model).feed(IDS[:BORDER])
    near(Oracle(fixed).feed(IDS[:BORDER]), whole[:BORDER])
    assert (short - whole[:BORDER]).abs().max() > 100 * TOLERANCE
    near(Oracle(fix_rope(model, BORDER)).feed(IDS[:BORDER]), short)
    session = session_of(fixed)
    near(session.prefill(torch.tensor([IDS[:BORDER]]))[0], whole[BORDER - 1])
    near(session.decode(torch.tensor([IDS[BORDER]]))[0], whole[BORDER])


@pytest.mark.usefixtures("fake_backend")
@pytest.mark.parametrize("kind", among(EACH[:2] + ["longrope phimoe"], ["longrope phimoe"]))
def test_a_program_with_fixed_factors_holds_more_than_the_border(kind: str, tmp_path: Path) -> None:
    model, folder = model_of(kind, layers=1), tmp_path / "x"
    with pytest.raises(InputError, match=f"or with rope_length={SLOTS} \\(--rope-length\\)"):
        export(model, "fake", SLOTS, folder, dry_run=True)
    options = {"prefill_chunk": CHUNK, "rope_length": SLOTS}
    remark = f"RoPE has the factors of sequences of {SLOTS} tokens at every length"
    assert remark in export(model, "fake", SLOTS, folder, dry_run=True, **options).remarks
    manifest = export(model, "fake", SLOTS, folder, **options).manifest
    assert (manifest.program.rope, manifest.program.rope_length) == (None, SLOTS)
    assert remark in manifest.remarks
    assert max(prompt["length"] for prompt in manifest.verification["prompts"]) > BORDER
    session, whole = load(folder), Oracle(model).feed(IDS)
    near(session.prefill(torch.tensor([IDS[: BORDER + 4]]))[0], whole[BORDER + 3])
    # The model is fixed again, which `verify` knows from the manifest.
    assert verify(folder, model).passed


def test_fixed_factors_of_constant_rope_are_refused() -> None:
    with pytest.raises(InputError, match="rope_length must be left out for LlamaForCausalLM, .* got 32; remove it"):
        fix_rope(model_of("static yarn", layers=1), 32)


@pytest.mark.parametrize("kind", among(EACH, ["longrope phi3"]))
def test_compiled(kind: str) -> None:
    """One graph each for prompts and tokens, on both sides of the border; several steps a launch."""
    from torch._dynamo.utils import counters

    model = model_of(kind, layers=1)
    session = session_of(model, compile="wait", buckets=False, steps_per_launch=2)
    oracle = Oracle(model)
    near(session.prefill(torch.tensor([IDS[: BORDER - 3]]))[0], oracle.feed(IDS[: BORDER - 3])[-1])
    for token in IDS[BORDER - 3 : BORDER + 5]:
        near(session.decode(torch.tensor([token]))[0], oracle.feed([token])[-1])
    for prompt in (BORDER - 7, BORDER + 2):
        session.reset()
        graphs = counters["stats"]["unique_graphs"]
        got = list(session.generate(torch.tensor([IDS[:prompt]]), 16))
        assert got == generated(model, IDS[:prompt], 16)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("rope", [{**_LONG, **_ORIGINAL}, {**_DYNAMIC, "factor": 4.0}], ids=["longrope", "dynamic"])
def test_positions_of_images_count(rope: dict[str, Any]) -> None:
    """Images take fewer positions than tokens: the border is one of positions, in prompts and in later tokens."""
    model = tiny_multimodal("qwen2_5_vl")
    config = model.config.text_config
    config.rope_parameters = {**config.rope_parameters, **copy.deepcopy(rope)}
    config.max_position_embeddings = BORDER if rope["rope_type"] == "dynamic" else 256
    language = model.model.language_model
    language.rotary_emb = type(language.rotary_emb)(config)
    for length in (10, BORDER + 4):
        inputs, following = multimodal_prompt(model, 1, length, 6), tokens(12).clamp(max=50)
        expected = multimodal_reference(copy.deepcopy(model), inputs, following)[0]
        session = session_of(model, modalities=("image",), image_size=(16, 24))
        inputs.pop("mm_token_type_ids")
        got = [session.prefill(**inputs), *(session.decode(token[None]) for token in following[0])]
        near(torch.cat(got), expected)


def test_rules() -> None:
    assert rope_rule(model_of("longrope phi3")).recomputes
    assert not rope_rule(model_of("longrope llama")).recomputes
    assert all(rope_rule(model_of(kind)).borders == (BORDER,) for kind in CHANGING)
    assert all(rope_rule(model_of(kind)) is None for kind in KINDS if kind not in CHANGING)
