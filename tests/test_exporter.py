"""Export: what it writes, and what it refuses before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exportable_cache import Session, export, load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.decoding import PromptLookup
from exportable_cache.errors import (
    BundleError,
    CacheFullError,
    ExportableCacheError,
    InputError,
    UnsupportedModelError,
)
from exportable_cache.verification.report import VerifyReport
from exportable_cache.verification.verify import _check_sizes, verify

from .decoding.byte_tokenizer import SIZE, byte_tokenizer
from .support.models import VOCAB, hybrid_model, tiny_model, tokens
from .support.oracle import difference, reference_logits
from .support.sessions import CAPACITY as BUNDLE_CAPACITY
from .support.sessions import exported_bundle, folded_bundle

CAPACITY = 64
CHUNK = 13
# Of the model of `folded_bundle`.
HEADS = {"num_attention_heads": 16}


pytestmark = pytest.mark.usefixtures("fake_backend")


@pytest.fixture(scope="module")
def model() -> Any:
    return hybrid_model(**HEADS)


# -- the real targets --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["pt2", "executorch"])
def bundle(request: pytest.FixtureRequest, model: Any) -> Bundle:
    """As `export` wrote it, in the store: a test that spoils it takes a copy."""
    if request.param == "executorch":
        pytest.importorskip("executorch")
        return Bundle.open(folded_bundle(llm_runner=True)[1])
    return Bundle.open(exported_bundle(model, request.param, prefill_chunk=CHUNK))


@pytest.fixture(scope="module")
def opened(bundle: Bundle) -> Session:
    return load(bundle.path)


@pytest.fixture
def session(opened: Session) -> Session:
    """Over the bundle, with nothing in its cache: opening one for every test takes longer than the tests."""
    opened.reset()
    return opened


def test_export_verifies_and_records_it(bundle: Bundle) -> None:
    recorded = Bundle.open(bundle.path).manifest.verification
    assert recorded is not None
    report = VerifyReport(**recorded)
    assert report.passed
    assert report.target == bundle.manifest.target
    assert [prompt.length for prompt in report.prompts] == [3, 7, 8, 9, 40, BUNDLE_CAPACITY]
    assert report.max_difference <= 1e-4


def test_loaded_program_agrees_with_the_model(session: Session, model: Any) -> None:
    for prompt in (1, 3, 14, 40):
        ids = tokens(60, seed=prompt)
        session.reset()
        worst = difference(
            lambda piece: session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece),
            reference_logits(model, ids, prompt),
            ids,
            prompt,
        )
        assert worst <= 1e-4


def test_verify_finds_other_weights(bundle: Bundle, model: Any) -> None:
    assert verify(bundle.path, model, prompts=[9], decode_steps=3).passed
    other = hybrid_model(**HEADS)
    with torch.no_grad():
        # One column: the norm after attention would undo a common factor.
        other.model.layers[1].self_attn.v_proj.weight[:, 0] *= 1.5
    assert not verify(bundle, other, prompts=[9], decode_steps=3).passed


def test_verify_refuses_another_type_or_vocabulary(bundle: Bundle) -> None:
    with pytest.raises(InputError, match="must be of type 'qwen2', from which .* got 'llama'"):
        verify(bundle, tiny_model("llama"))
    with pytest.raises(
        InputError, match="must have intermediate_size=.*, with which .* was made, got 96; pass the model"
    ):
        verify(bundle, hybrid_model(intermediate_size=96))
    with pytest.raises(InputError, match="vocabulary of 128 tokens, the model of 200"):
        verify(bundle, hybrid_model(vocab_size=200))


def test_sizes_of_a_stranger_s_config_are_compared_or_refused(tmp_path: Path) -> None:
    given = {"hidden_size": 32, "text_config": None}
    bundle: Any = SimpleNamespace(path=tmp_path, manifest=SimpleNamespace(files=["config.json"]))
    for text in ('{"text_config": null, "hidden_size": 32}', '{"hidden_size": [64], "num_hidden_layers": 3}'):
        (tmp_path / "config.json").write_text(text)
        _check_sizes(bundle, given)
    for text in ("[]", '{"text_config": 5}', '{"text_config": "ab"}', "{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BundleError, match="config.json of .* must be a model's config in JSON; export the model"):
            _check_sizes(bundle, given)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (
            tokens(BUNDLE_CAPACITY - 9),
            CacheFullError,
            f"holds 10 of at most {BUNDLE_CAPACITY} tokens, {BUNDLE_CAPACITY - 9} more do not fit",
        ),
        (torch.empty(1, 0, dtype=torch.int64), InputError, "empty"),
        (tokens(4, batch_size=2), InputError, "input_ids must have 1 rows, got 2"),
        (tokens(4).int(), InputError, "must be torch.int64, got torch.int32"),
        (torch.tensor([[VOCAB]]), InputError, f"must be a token id from 0 to {VOCAB - 1}, got {VOCAB}"),
    ],
)
def test_refused_prompts_change_nothing(
    session: Session, model: Any, ids: torch.Tensor, error: type, message: str
) -> None:
    fed = tokens(11)
    session.prefill(fed[:, :10])
    with pytest.raises(error, match=message):
        session.prefill(ids)
    assert session.length.tolist() == [10]
    torch.testing.assert_close(session.decode(fed[:, 10]), reference_logits(model, fed, 11)[:, 0], atol=1e-4, rtol=0)


def test_rewind_on_the_target(session: Session, model: Any) -> None:
    ids = tokens(30)
    session.prefill(ids[:, :29])
    session.decode(torch.tensor([5]))
    session.rewind(1)
    torch.testing.assert_close(session.decode(ids[:, 29]), reference_logits(model, ids, 30)[:, 0], atol=1e-4, rtol=0)


def test_two_sessions_of_one_bundle_do_not_share_a_cache(bundle: Bundle, model: Any) -> None:
    first, second = load(bundle.path), load(bundle.path)
    ids = tokens(12)
    first.prefill(ids[:, :11])
    second.prefill(tokens(20, seed=1))
    torch.testing.assert_close(first.decode(ids[:, 11]), reference_logits(model, ids, 12)[:, 0], atol=1e-4, rtol=0)


def test_damaged_program_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    name = next(name for name in bundle.manifest.files if name.startswith("program"))
    damaged = shutil.copytree(bundle.path, tmp_path / "bundle")
    contents = (damaged / name).read_bytes()
    (damaged / name).write_bytes(contents[: len(contents) // 2])
    with pytest.raises(BundleError, match=f"{name} has {len(contents) // 2} bytes, the manifest says {len(contents)}"):
        load(damaged)
    assert load(bundle.path).target == bundle.manifest.target


def test_explicit_form_is_recorded_and_agrees() -> None:
    # As in cli/test_elsewhere.py.
    model = tiny_model("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    bundle = Bundle.open(exported_bundle(model, "pt2", prefill_chunk=4, verify=False, form="explicit"))
    assert bundle.manifest.program.form == "explicit"
    assert bundle.manifest.options == {"form": "explicit"}
    names = [signature.name for signature in bundle.manifest.program.methods["decode"].inputs]
    assert names[:3] == ["input_ids", "input_pos", "cache.layers.0.keys"]
    ids = tokens(20)
    logits = load(bundle.path).prefill(ids)
    torch.testing.assert_close(logits, reference_logits(model, ids, 20)[:, 0], atol=1e-4, rtol=0)


def test_rows(tmp_path: Path) -> None:
    model = hybrid_model()
    bundle = export(model, "pt2", CAPACITY, tmp_path / "rows", batch_size=2, prefill_chunk=1)
    ids = tokens(20, batch_size=2)
    session = load(bundle.path)
    torch.testing.assert_close(session.prefill(ids), reference_logits(model, ids, 20)[:, 0], atol=1e-4, rtol=0)
    with pytest.raises(InputError, match="must have 2 rows, got 1"):
        session.prefill(tokens(3))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_folder_with_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "tiny-bytes"
    tiny_model("llama", vocab_size=SIZE).save_pretrained(source)
    byte_tokenizer(chat=True).save_pretrained(source)
    bundle = export(str(source), "fake", CAPACITY, tmp_path / "out", dtype="float16")
    assert bundle.manifest.verification["passed"]
    assert bundle.manifest.source == "tiny-bytes"
    assert bundle.manifest.dtype == "float16"
    assert bundle.manifest.layers[0].tensors["keys"].dtype == "float16"
    tokenizer = load(bundle.path).tokenizer
    assert tokenizer is not None and tokenizer.chat_template == byte_tokenizer(chat=True).chat_template


def test_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = hybrid_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(model, "fake", CAPACITY, tmp_path / "out")
    assert model.config._attn_implementation == "eager"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not [name for name, _ in model.named_buffers() if "layers_0" in name]


def test_a_model_that_gives_fewer_ids_than_it_looks_up_says_how_many(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.resize_token_embeddings(VOCAB + 8)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCAB, bias=False)
    bundle = export(model, "fake", 48, tmp_path / "out")
    manifest = bundle.manifest
    assert (manifest.vocab_size, manifest.logits_size) == (VOCAB + 8, VOCAB)
    assert {method.outputs[0].shape[-1] for method in manifest.program.methods.values()} == {VOCAB}
    assert load(bundle.path).prefill(torch.tensor([[VOCAB + 3, 5]])).shape == (1, VOCAB)


def test_unverified_export_says_so(model: Any, tmp_path: Path) -> None:
    bundle = export(model, "fake", CAPACITY, tmp_path / "out", verify=False, spoil=1.0)
    assert bundle.manifest.verification is None
    assert not verify(bundle, model).passed


def test_overwrite_replaces_a_bundle(model: Any, tmp_path: Path) -> None:
    export(model, "fake", CAPACITY, tmp_path / "out", verify=False)
    (tmp_path / "out" / "extra").write_text("1")
    with pytest.raises(BundleError, match="it holds extra, which no export wrote, so it is not overwritten"):
        export(model, "fake", CAPACITY // 2, tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "extra").unlink()
    bundle = export(model, "fake", CAPACITY // 2, tmp_path / "out", overwrite=True, verify=False)
    assert Bundle.open(bundle.path).manifest.program.max_cache_len == CAPACITY // 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_progress_names_the_stages(model: Any, tmp_path: Path) -> None:
    stages: dict[str, None] = {}
    export(model, "fake", CAPACITY, tmp_path / "out", progress=lambda stage, done, total: stages.setdefault(stage))
    assert list(stages) == ["lowering to fake", "checking files", "opening the fake program", "verifying"]


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "target": (
        {"target": "abacus"},
        InputError,
        "unknown target 'abacus'; choose one of pt2, aoti, executorch, tensorrt",
    ),
    "option": ({"colour": "red"}, InputError, "has no option 'colour'"),
    "cache length": ({"max_cache_len": 0}, InputError, "max_cache_len must be an int of at least 1, got 0"),
    "fractional length": ({"max_cache_len": 64.0}, InputError, "max_cache_len must be .*, got 64.0"),
    "batch size": ({"batch_size": -1}, InputError, "batch_size must be an int of at least 1, got -1"),
    "chunk": ({"prefill_chunk": 0}, InputError, "prefill_chunk must be .*got 0"),
    "dtype": ({"dtype": "int8"}, InputError, "dtype must be .*, got 'int8'"),
    "no folder": ({"output_dir": None}, InputError, "output_dir must be given"),
    "empty folder": (
        {"output_dir": ""},
        InputError,
        "output_dir must name .*got ''; name the folder to write",
    ),
    "working folder": (
        {"output_dir": Path("")},
        InputError,
        "output_dir must name a new folder, got '.'; name the folder to write",
    ),
    "root": ({"output_dir": "/"}, InputError, "output_dir must name a new folder, got '/'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_model_is_looked_at(case: str, tmp_path: Path) -> None:
    options, error, message = REFUSED[case]
    arguments = {"target": "fake", "max_cache_len": CAPACITY, "output_dir": tmp_path / "out", **options}
    with pytest.raises(error, match=message):
        # A model that does not exist: had it been looked for, the error would be another.
        export(str(tmp_path / "no-such-model"), **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_unwritable_folder_is_refused_before_the_model_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot write /proc/out: .*; choose a folder that you can write to"):
        export(str(tmp_path / "no-such-model"), "fake", CAPACITY, "/proc/out")


def test_existing_folder_is_refused_and_kept(model: Any, tmp_path: Path) -> None:
    first = export(model, "fake", CAPACITY, tmp_path / "out", verify=False)
    with pytest.raises(BundleError, match="out exists; choose another folder, or overwrite it"):
        export(str(tmp_path / "no-such-model"), "fake", CAPACITY, tmp_path / "out")
    assert Bundle.open(tmp_path / "out").manifest == first.manifest
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("1")
    with pytest.raises(BundleError, match="never overwritten"):
        export(model, "fake", CAPACITY, tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "precious").read_text() == "1"


def test_chunk_longer_than_the_cache_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prefill_chunk must be 1 to 64.*got 65"):
        export(model, "fake", CAPACITY, tmp_path / "out", prefill_chunk=65)
    assert list(tmp_path.iterdir()) == []


def test_unsupported_models_are_refused_without_loading_weights(tmp_path: Path) -> None:
    source = tmp_path / "reformer"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "reformer"}')
    with pytest.raises(ExportableCacheError) as error:
        export(source, "fake", CAPACITY, tmp_path / "out")
    assert isinstance(error.value, UnsupportedModelError), error.value
    assert not (tmp_path / "out").exists()


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    model = tiny_model("gpt2", max_position_embeddings=32)
    with pytest.raises(InputError, match="at most 32 tokens, the positions of GPT2LMHeadModel .*, got 64"):
        export(model, "fake", CAPACITY, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    bundle = export(model, "fake", 32, tmp_path / "out")
    assert bundle.manifest.verification is not None and bundle.manifest.verification["passed"]


# -- names of options -------------------------------------------------------------------------------------------------


# In the fast lane: over live sessions, in decoding/test_speculative.py.
@pytest.mark.full
def test_rollback_slots_let_a_bundle_of_rings_take_back_and_speculate(tmp_path: Path) -> None:
    model = hybrid_model()
    session = load(
        export(model, "pt2", 64, tmp_path / "bundle", prefill_chunk=16, rollback_slots=4, score_length=6).path
    )
    assert [layer.capacity for layer in session.layers] == [12, 64]
    prompt = tokens(20)
    expected = list(session.generate(prompt, 15))
    session.reset()
    assert list(session.generate(prompt, 15, draft=PromptLookup(5))) == expected
    session.rewind(5)


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_rollback_slots_are_a_count(tmp_path: Path, count: Any) -> None:
    with pytest.raises(InputError, match=f"rollback_slots must be an int of at least 0, got {count!r}"):
        export("demo", "pt2", 64, tmp_path / "bundle", rollback_slots=count)
