"""LoRA adapters as data: loaded into slots of a running program, against peft's own model."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exportable_cache import ExportableCache, export, load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.decoding import ContinuousBatch
from exportable_cache.errors import BundleError, InputError, UnsupportedModelError
from exportable_cache.models.loading.adapters import read_lora
from exportable_cache.models.lora import LoraSlots, LoraTarget, check_fits, remove_slots, slots_of
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.program.spec import LORA_RANK
from exportable_cache.session.adapters import write_adapter_file
from exportable_cache.session.opening import ModelOptions, Use, open_model
from exportable_cache.session.session import Session
from exportable_cache.verification.verify import _with_products, verify

from .support.models import tiny_model, tokens
from .support.oracle import difference, reference_logits
from .test_adapters import adapted

CAPACITY, LENGTH, PROMPT = 32, 13, 9
LIMIT = 1e-5
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"r": 2, "target_modules": ["k_proj", "up_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "o_proj", "gate_proj"],
        "rank_pattern": {"o_proj": 3, r"layers\.1\.mlp\.gate_proj": 1},
        "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 32, "gate_proj": 2},
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of three adapters for the tiny model, by name."""
    path = tmp_path_factory.mktemp("lora")
    for seed, (name, options) in enumerate(KINDS.items()):
        adapted(seed, **options).save_pretrained(path / name)
    return {name: path / name for name in KINDS}


@pytest.fixture(scope="module")
def expected() -> dict[str | None, torch.Tensor]:
    """Return the logits of peft's model for each adapter, and of the model itself for None."""
    ids = tokens(LENGTH)
    base = reference_logits(tiny_model("llama"), ids, PROMPT)
    found = {
        name: reference_logits(adapted(seed, **options), ids, PROMPT)
        for seed, (name, options) in enumerate(KINDS.items())
    }
    assert all((one - base).abs().max() > 0.1 for one in found.values())
    return {None: base, **found}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle with slots for adapters. Read it only."""
    path = tmp_path_factory.mktemp("bundle") / "out"
    model = tiny_model("llama")
    made = export(model, "pt2", CAPACITY, path, lora_slots=3, lora_rank=4, prefill_chunk=1)
    assert slots_of(model) is None
    return made.path


def live(**options: Any) -> Session:
    """Return a session over the tiny model with slots for adapters."""
    sizes = {"max_cache_len": CAPACITY, "lora_slots": 3, "lora_rank": 4}
    return Session.from_model(tiny_model("llama"), **{**sizes, **options})


def check_swaps(session: Session, folders: dict[str, Path], expected: dict[str | None, torch.Tensor]) -> None:
    """Compare the logits with each adapter, switching between them."""
    for name, folder in folders.items():
        assert session.load_adapter(folder) == name
    assert session.adapters == tuple(folders)
    for name in (None, *folders, None, "one"):
        session.reset()
        session.use_adapter(name)
        assert difference(session.prefill, expected[name], tokens(LENGTH), PROMPT) < LIMIT, name


def test_adapters_give_the_logits_of_peft(folders: dict[str, Path], expected: dict[str | None, torch.Tensor]) -> None:
    """A live session switches between adapters of different ranks, layers and scales."""
    check_swaps(live(), folders, expected)


def test_a_swap_compiles_nothing(folders: dict[str, Path], expected: dict[str | None, torch.Tensor]) -> None:
    """The first adapter compiles its own graphs, and later ones use them."""
    session = live(compile="wait", prefill_chunk=1)
    session.load_adapter(folders["one"])
    for name in (None, "one"):
        session.reset()
        session.use_adapter(name)
        session.decode(tokens(1)[0])
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before >= 2
    check_swaps(session, folders, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_rows_have_adapters_of_their_own(folders: dict[str, Path], expected: dict[str | None, torch.Tensor]) -> None:
    """Each row of a batch uses the adapter in its slot, and a fork keeps the choice."""
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, CAPACITY, batch_size=3)
    session = Session.from_model(model, cache, lora_slots=2, lora_rank=4)
    for name in ("one", "two"):
        session.load_adapter(folders[name])
    chosen = ["two", None, "one"]
    session.use_adapter(chosen)
    reference = torch.cat([expected[name] for name in chosen])
    ids = tokens(LENGTH).expand(3, -1).contiguous()
    assert difference(session.fork().prefill, reference, ids, PROMPT) < LIMIT
    assert difference(session.prefill, reference, ids, PROMPT) < LIMIT
    with pytest.raises(InputError, match="one name, or 3 for the rows, got 2"):
        session.use_adapter(["one", None])


@pytest.mark.parametrize("has_prefill", [True, False])
def test_requests_of_a_batch_have_adapters_of_their_own(folders: dict[str, Path], has_prefill: bool) -> None:
    """Requests run side by side, and none uses tokens again that another adapter computed."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    options = {"lora_slots": 2, "lora_rank": 4}
    cache = ExportableCache.from_model(model, CAPACITY, batch_size=3)
    decode = Session.from_model(model, cache, **options)
    alone = Session.from_model(model, max_cache_len=CAPACITY, **options)
    prefill = Session.from_model(model, max_cache_len=CAPACITY, **options) if has_prefill else None
    for name in ("one", "two"):
        decode.load_adapter(folders[name])
    prompt, expected = tokens(PROMPT), {}
    for name in (None, "one", "two"):
        alone.reset()
        alone.use_adapter(name)
        expected[name] = list(alone.generate(prompt, 6))
    assert len({tuple(one) for one in expected.values()}) == 3
    batch = ContinuousBatch(prefill, decode)
    reused: dict[str | None, list[int]] = {name: [] for name in expected}
    for names in ((None, "one", "two", "one"), ("two", None), ("one",)):
        requests = []
        for name in names:
            request = batch.submit(prompt, 6)
            request.adapter = decode.named_adapter(name)
            requests.append((name, request))
            # Later requests begin while the rows of earlier ones hold the same prompt.
            batch.step()
            batch.step()
        list(batch.run())
        for name, request in requests:
            assert request.tokens == expected[name]
            reused[name].append(request.reused_tokens)
    assert [found[0] for found in reused.values()] == [0, 0, 0] and not any(one.slot for one in decode.stepper.adapters)
    # With a prefill session, all are in the tree; without one, at least the rows that no other request took.
    assert all(found[-1] == PROMPT - 1 for found in reused.values()) or not has_prefill
    assert any(found[-1] == PROMPT - 1 for found in reused.values())
    # Another adapter under the same name.
    decode.load_adapter(folders["two"], "one")
    request = batch.submit(prompt, 6)
    request.adapter = decode.named_adapter("one")
    list(batch.run())
    assert (request.tokens, request.reused_tokens) == (expected["two"], 0)


@pytest.mark.parametrize("name", [5, [5], {"one": 1}])
def test_names_of_adapters_are_checked(name: Any) -> None:
    with pytest.raises(InputError, match="adapter must be a name, None, or a list with one for each row, got"):
        live().use_adapter(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_slots": 10**12}, "lora_slots must be at most 1024, got 1000000000000"),
        ({"lora_slots": 1000, "lora_rank": 10**12}, "lora_slots=1000 with lora_rank=1000000000000 need more memory"),
        ({"lora_slots": 0}, "lora_rank requires lora_slots, got 4"),
        ({"lora_targets": 5}, "lora_targets must be names of linear layers, got 5"),
        ({"lora_targets": "qproj"}, "lora_targets must be linear layers of the decoder, got 'qproj'"),
    ],
)
def test_options_of_slots_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        live(**options)


def test_one_target_is_a_name() -> None:
    model = tiny_model("llama")
    Session.from_model(model, max_cache_len=CAPACITY, lora_slots=1, lora_targets="q_proj")
    slots = slots_of(model)
    assert slots is not None and {one.name.rpartition(".")[2] for one in slots.targets} == {"q_proj"}


def test_an_adapter_of_a_model_with_other_layers_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """A live model gets the slots that its adapters need, so the message must be about the adapter."""
    folder = tmp_path / "deeper"
    shutil.copytree(folders["one"], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("layers.1", "layers.77"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match="the adapter in .*deeper changes 'model.layers.77.*, which is not a linear"):
        open_model("demo", ModelOptions(max_cache_len=32, compile=False), Use(adapter=folder))


def test_products_of_adapters_fit_the_dtype() -> None:
    slots = LoraSlots(1, 4, "float16", (LoraTarget("q", 8, 8),))
    large, small = torch.full((4, 8), 200.0), torch.full((8, 4), 60.0)
    check_fits(slots, {"q": (large, small)}, "it")
    with pytest.raises(InputError, match="it must have values, and products of its matrices, that float16 holds"):
        check_fits(slots, {"q": (large, 2 * small)}, "it")
    # Only a bound is too large, because signs differ.
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    check_fits(slots, {"q": (large, 2 * small * signs)}, "it")


def test_an_adapter_file_is_readable_as_other_files_are(folders: dict[str, Path], tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "one.adapter"
    session = Session.from_model(model, max_cache_len=CAPACITY, lora_slots=3, lora_rank=4)
    slots = slots_of(model)
    assert slots is not None
    write_adapter_file(path, read_lora(folders["one"]), slots, session.fingerprint, None)
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_saved_state_belongs_to_its_adapter(folders: dict[str, Path], tmp_path: Path) -> None:
    """The tokens of a state were computed with an adapter, whatever its name is now."""
    session = live()
    session.load_adapter(folders["one"])
    session.load_adapter(folders["two"])
    session.save_state(tmp_path / "plain")
    session.use_adapter("one")
    expected = session.prefill(tokens(PROMPT))
    session.save_state(tmp_path / "one")
    follows = session.decode(tokens(1)[0])
    for name, path, message in (
        ("one", "plain", "row 0 of .*plain was computed with no adapter, but the session uses the adapter 'one'"),
        ("two", "one", "computed with the adapter 'one', but the session uses the adapter 'two'; use_adapter"),
        (None, "one", "computed with the adapter 'one', but the session uses no adapter"),
    ):
        session.use_adapter(name)
        with pytest.raises(InputError, match=message):
            session.load_state(tmp_path / path)
    other = live()
    other.load_adapter(folders["one"], "renamed")
    other.use_adapter("renamed")
    other.load_state(tmp_path / "one")
    assert expected.shape == follows.shape and torch.equal(other.decode(tokens(1)[0]), follows)


def test_a_bundle_holds_adapters(
    bundle: Path, folders: dict[str, Path], expected: dict[str | None, torch.Tensor]
) -> None:
    """A pt2 program switches between adapters, and its base is verified."""
    check_swaps(load(bundle), folders, expected)
    with zipfile.ZipFile(bundle / "program.pt2") as archive:
        name = next(one for one in archive.namelist() if one.endswith("adapted_decode_constants_config.json"))
        kept = json.loads(archive.read(name))["config"]
        records = {one["path_name"] for layer, one in kept.items() if layer.endswith(("lora_a", "lora_b"))}
        # Slots are zeros, which are not written.
        sizes = [archive.getinfo(name.rpartition("/")[0] + f"/{record}").file_size for record in records]
    assert sizes == [0] * 28


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"quantize": "8da8w"}])
def test_an_executorch_program_holds_adapters(tmp_path: Path, options: dict[str, Any]) -> None:
    """An ExecuTorch program of layers that are lowered once switches between adapters."""
    pytest.importorskip("executorch")
    model = tiny_model("llama", num_hidden_layers=4)
    adapted(model=tiny_model("llama", num_hidden_layers=4)).save_pretrained(tmp_path / "one")
    path = export(
        model, "executorch", CAPACITY, tmp_path / "out", recipe="portable", lora_slots=1, lora_rank=4, **options
    ).path
    for adapter in (None, tmp_path / "one"):
        # Both in one process, so that what one program has written is not the other's.
        assert verify(path, model, adapter=adapter).passed
    session = load(path)
    before = session.prefill(tokens(PROMPT))
    session.load_adapter(tmp_path / "one")
    session.reset()
    assert torch.equal(session.prefill(tokens(PROMPT)), before)
    session.reset()
    session.use_adapter("one")
    assert (session.prefill(tokens(PROMPT)) - before).abs().max() > 0.1


def test_a_quantized_model_has_adapters(folders: dict[str, Path]) -> None:
    """The quantized weights stay, and the adapter's products are float."""
    pytest.importorskip("torchao")
    model = quantize(tiny_model("llama"), Quantization("8w"), dtype=torch.float32).model
    ids = tokens(LENGTH)
    with Session.from_model(model, max_cache_len=CAPACITY, lora_slots=1, lora_rank=4) as session:
        session.use_adapter(session.load_adapter(folders["one"]))
        with _with_products(model, read_lora(folders["one"]).tensors):
            reference = reference_logits(model, ids, PROMPT)
        assert (reference - reference_logits(model, ids, PROMPT)).abs().max() > 0.1
        assert difference(session.prefill, reference, ids, PROMPT) < LIMIT


def test_slots_are_freed_and_replaced(folders: dict[str, Path], expected: dict[str | None, torch.Tensor]) -> None:
    """A full program refuses another adapter, and an unloaded one leaves the model itself."""
    session = live(lora_slots=1)
    session.load_adapter(folders["one"])
    with pytest.raises(InputError, match=r"has 1 slots for adapters, which hold one; unload"):
        session.load_adapter(folders["two"])
    session.use_adapter("one")
    session.load_adapter(folders["two"], "one")
    assert difference(session.prefill, expected["two"], tokens(LENGTH), PROMPT) < LIMIT
    session.unload_adapter("one")
    assert session.adapters == ()
    session.reset()
    assert difference(session.prefill, expected[None], tokens(LENGTH), PROMPT) < LIMIT
    with pytest.raises(InputError, match=r"one that was loaded \(none\), or None, got 'one'"):
        session.use_adapter("one")


def test_a_model_keeps_its_weights() -> None:
    """Slots do not change the state dict."""
    model = tiny_model("llama", tie_word_embeddings=True)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with Session.from_model(model, max_cache_len=CAPACITY, lora_slots=2, lora_targets=["q_proj,layers.1.mlp.up_proj"]):
        found = slots_of(model)
        assert found is not None and [one.name.split(".", 2)[2] for one in found.targets] == [
            "0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj",
        ]  # fmt: skip
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    remove_slots(model)
    assert slots_of(model) is None and type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


def test_sessions_of_one_model_share_its_adapters(
    folders: dict[str, Path], expected: dict[str | None, torch.Tensor]
) -> None:
    """Sessions with equal slots, or with none, do not disturb each other; others end the adapters with an error."""
    model, ids = tiny_model("llama"), tokens(LENGTH)
    one, two = (Session.from_model(model, max_cache_len=CAPACITY, lora_slots=2, lora_rank=4) for _ in range(2))
    plain = Session.from_model(model, max_cache_len=CAPACITY)
    one.load_adapter(folders["one"])
    two.load_adapter(folders["two"])
    assert one.adapters == two.adapters == ("one", "two")
    for session, name in ((one, "two"), (two, "one"), (plain, None)):
        session.use_adapter(name)
        assert difference(session.prefill, expected[name], ids, PROMPT) < LIMIT
    Session.from_model(model, max_cache_len=CAPACITY, lora_slots=1, lora_rank=4)
    with pytest.raises(InputError, match="another session or an export has replaced them; make another session"):
        one.decode(ids[:, 0])
    one.use_adapter(None)
    one.decode(ids[:, 0])


def test_no_session_uses_a_slot_of_another_adapter(folders: dict[str, Path]) -> None:
    """Other sessions and forks continue without an adapter after it was unloaded and its slot was used again."""
    from types import SimpleNamespace

    from exportable_cache.decoding import Completer

    model, ids = tiny_model("llama"), tokens(LENGTH)
    one, two = (Session.from_model(model, max_cache_len=CAPACITY, lora_slots=2, lora_rank=4) for _ in range(2))
    base = one.prefill(ids)
    for session in (one, two):
        session.use_adapter(session.load_adapter(folders["two"]))
    fork = two.fork()
    completer: Any = SimpleNamespace(session=two, _own=two.stepper.adapters, _used=None, _held=None)
    Completer._use(completer, "two")
    completer._held = [1]
    Completer._use(completer, None)
    assert completer._held == [1]
    two.load_adapter(folders["two"])
    Completer._use(completer, None)
    assert completer._held is None
    one.unload_adapter("two")
    one.load_adapter(folders["one"])
    for session in (two, fork):
        session.reset()
        assert torch.equal(session.prefill(ids), base)


def test_adapters_that_a_dtype_does_not_hold_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Finite values can be infinite after the scale and in the program's dtype."""
    config = json.loads((folders["one"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1e300}))
    save_file(load_file(folders["one"] / "adapter_model.safetensors"), tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"values, .*, that float32 holds, got larger ones in model.layers.0"):
        live().load_adapter(tmp_path)


def test_programs_refuse_what_they_have_no_slots_for(folders: dict[str, Path], tmp_path: Path) -> None:
    """Each refusal names the value and the remedy."""
    with pytest.raises(InputError, match="has no slots for adapters; export, or make the session, with lora_slots=1"):
        live(lora_slots=0, lora_rank=LORA_RANK).load_adapter(folders["one"])
    with pytest.raises(InputError, match=r"rank of at most 2, got 4 in .*; export with lora_rank=4"):
        live(lora_rank=2).load_adapter(folders["one"])
    with pytest.raises(InputError, match=r"changes 'model.layers.0.*down_proj'.*; export with lora_targets"):
        live(lora_targets=["q_proj", "v_proj"]).load_adapter(folders["one"])
    adapted(model=tiny_model("llama", intermediate_size=48)).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match=r"64 inputs and 32 outputs in .*down_proj, got 48 and 32; it was trained for"):
        live().load_adapter(tmp_path / "other")
    for target in ("lm_head", "embed_tokens", "experts"):
        with pytest.raises(InputError, match=f"layers of the decoder, got '{target}'; use some of q_proj, k_proj, v_p"):
            live(lora_targets=[target])
    with pytest.raises(InputError, match="lora_targets requires lora_slots"):
        live(lora_slots=0, lora_rank=LORA_RANK, lora_targets=["q_proj"])
    with pytest.raises(InputError, match="lora_slots=1 is not supported by target 'aoti'"):
        export("demo", "aoti", CAPACITY, tmp_path / "out", lora_slots=1)
    with pytest.raises(InputError, match="lora_slots=1 cannot be combined with a cache that is an input"):
        export(tiny_model("llama"), "pt2", CAPACITY, tmp_path / "out", lora_slots=1, form="explicit")


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config, _: config.update(peft_type="IA3"), "must hold a LoRA adapter, got IA3; merge it at export"),
        (lambda config, _: config.update(use_dora=True), "use_dora, DoRA, which scales whole weights"),
        (lambda config, _: config.update(modules_to_save=["lm_head"]), "modules_to_save, whole layers"),
        (lambda config, _: config.update(target_parameters=["experts"]), "target_parameters, parameters that are not"),
        (lambda config, _: config.update(bias="all"), "bias='all', changed biases"),
        (lambda config, _: config.update(init_lora_weights="pissa_niter_4"), "which changes the base model; save it"),
        (lambda config, _: config.update(lora_alpha="much"), "must have a number as lora_alpha of .*, got 'much'"),
        (lambda config, _: config.update(alpha_pattern={r"((\w|\.)+)+!": 8}), "alpha_pattern of layer names .*got"),
        (lambda _, tensors: tensors.update({NAME: tensors[NAME].to(torch.float8_e5m2)}), "16, 32 or 64 bits, got"),
        (lambda config, _: config.update(lora_alpha=float("inf")), "must have a finite lora_alpha, got inf"),
        (
            lambda _, tensors: tensors[NAME].fill_(torch.nan),
            "must have finite values of 16, 32 or 64 bits, got infinities or not-a-number in .*lora_A",
        ),
        (lambda _, tensors: tensors.pop(NAME), "must have lora_A and lora_B of .*q_proj, got .*lora_B"),
        (lambda _, tensors: tensors.clear(), "has no tensors; save it again"),
        (
            lambda _, tensors: tensors.update({"base_model.model.embed.lora_embedding_A": torch.ones(2, 2)}),
            "embeddings, which slots do not hold",
        ),
    ],
)
def test_adapters_that_slots_do_not_hold_are_refused(
    folders: dict[str, Path], tmp_path: Path, change: Change, message: str
) -> None:
    """Each kind is refused by its name in the config or among the tensors."""
    config = json.loads((folders["one"] / "adapter_config.json").read_text())
    tensors = load_file(folders["one"] / "adapter_model.safetensors")
    change(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises((InputError, UnsupportedModelError), match=message):
        read_lora(tmp_path)


def test_files_that_are_no_adapters_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """A pickle is not read, and damaged files are named."""
    with pytest.raises(InputError, match=r"cannot read .*adapter_config.json: .*; pass the folder that peft saved"):
        read_lora(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"cannot read .*adapter_config.json"):
        read_lora(tmp_path)
    (tmp_path / "adapter_config.json").write_text((folders["one"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.bin").write_bytes(b"cposix\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(InputError, match=r"adapter_model.bin is a pickle, which can run code; save the adapter with"):
        read_lora(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InputError, match=r"cannot read .*adapter_model.safetensors: .*copy the adapter again"):
        read_lora(tmp_path)


def test_adapter_files_belong_to_their_program(
    bundle: Path, folders: dict[str, Path], expected: dict[str | None, torch.Tensor], tmp_path: Path
) -> None:
    """A file loads into the program that it was made for, and into no other."""
    session, path = load(bundle), tmp_path / "one.adapter"
    slots = Bundle.open(bundle).manifest.program.lora.described()
    write_adapter_file(path, read_lora(folders["one"]), slots, session.fingerprint, None)
    assert session.load_adapter(path) == "one"
    session.use_adapter("one")
    assert difference(session.prefill, expected["one"], tokens(LENGTH), PROMPT) < LIMIT
    other = tiny_model("llama", rms_norm_eps=1e-3)
    with torch.no_grad():
        other.model.norm.weight.add_(1)
    with pytest.raises(InputError, match=r"was made for other weights than those of this program; make it again with"):
        Session.from_model(other, max_cache_len=CAPACITY, lora_slots=1).load_adapter(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match="is damaged: checksum"):
        session.load_adapter(path)
    with pytest.raises(BundleError, match="there is no such file; pass a folder that peft saved, or a file of `export"):
        session.load_adapter(tmp_path / "missing")
    with pytest.raises(InputError, match="is a part of an adapter that peft saved; pass its folder"):
        session.load_adapter(folders["one"] / "adapter_model.safetensors")
    write_adapter_file(path, read_lora(folders["one"]), slots, session.fingerprint, None)


def test_inspect_shows_the_slots(bundle: Path) -> None:
    """The table of methods stays short, and the slots have a line."""
    from typer.testing import CliRunner

    from exportable_cache.cli.app import app

    shown = " ".join(CliRunner().invoke(app, ["inspect", str(bundle)]).stdout.split())
    assert "slots for 3 adapters of rank up to 4, 64.0 KiB besides the cache: 14 layers (q_proj, k_proj" in shown
    assert "slot int64 [1], adapter (28 tensors)" in shown and "a_0" not in shown


def test_an_adapter_is_signed(bundle: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """With a key only a file that is signed with it is loaded."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    keys = []
    for name in ("ours", "theirs"):
        pem = ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        keys.append(tmp_path / name)
        keys[-1].write_bytes(pem)
    session, path = load(bundle), tmp_path / "one.adapter"
    slots, adapter = Bundle.open(bundle).manifest.program.lora.described(), read_lora(folders["one"])
    write_adapter_file(path, adapter, slots, session.fingerprint, None)
    with pytest.raises(BundleError, match=r"must be signed by .*it has no one.adapter.sig"):
        session.load_adapter(path, key=keys[0])
    write_adapter_file(path, adapter, slots, session.fingerprint, None, keys[0])
    assert session.load_adapter(path, key=keys[0]) == "one"
    with pytest.raises(BundleError, match="must be signed by the given key"):
        session.load_adapter(path, key=keys[1])
    write_adapter_file(path, read_lora(folders["two"]), slots, session.fingerprint, None)
    with pytest.raises(BundleError, match="does not match the file, so it was changed after it was signed"):
        session.load_adapter(path, key=keys[0])
    with pytest.raises(InputError, match="key requires a file of"):
        session.load_adapter(folders["one"], key=keys[0])


def test_the_command_makes_and_verifies_an_adapter(bundle: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """The file has the report of a comparison with the model, and a wrong model fails it."""
    from typer.testing import CliRunner

    from exportable_cache.cli.app import app

    tiny_model("llama").save_pretrained(tmp_path / "model")
    output = tmp_path / "one.adapter"
    arguments = ["adapter", str(folders["one"]), "--for", str(bundle), "-o", str(output), "--model"]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "model"), "--json"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["path"] == str(output) and made["verification"]["passed"] and made["verification"]["steps"] > 10
    assert load(bundle).load_adapter(output) == "one"
    output.unlink()
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.add_(0.1)
    other.save_pretrained(tmp_path / "model")
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "model")])
    assert result.exit_code == 1 and "was not written" in result.stderr and not output.exists()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_server_has_a_model_for_each_adapter(tmp_path: Path, rows: int) -> None:
    """A request chooses its adapter by the model's name, and prefixes of other adapters are not used again."""
    pytest.importorskip("fastapi")
    testclient = pytest.importorskip("starlette.testclient")
    from exportable_cache.cli.server.app import ServerOptions, make_app
    from exportable_cache.decoding import BatchCompleter, Completer
    from exportable_cache.models.loading.loading import load_model
    from exportable_cache.session.opening import ModelOptions, Use, open_model, open_rows

    loaded = load_model("demo")
    adapted(model=loaded.model, target_modules=["q_proj", "v_proj"]).save_pretrained(tmp_path / "one")
    options = ModelOptions(max_cache_len=64, compile=False)
    session, loaded = open_model("demo", options, Use(adapters={"one": tmp_path / "one"}))

    def text(name: str | None) -> str:
        session.reset()
        session.use_adapter(name)
        found = session.generate_text("the code of amber is 4821. amber?", max_new_tokens=6, temperature=0)
        session.use_adapter(None)
        return found

    wanted = {"demo": text(None), "demo:one": text("one")}
    assert wanted["demo"] != wanted["demo:one"]
    request = {"prompt": "the code of amber is 4821. amber?", "max_tokens": 6, "temperature": 0}
    completer: Any = Completer(session)
    if rows > 1:
        session.reset()
        decode = open_rows(session, loaded.model, options, rows)
        completer = BatchCompleter(ContinuousBatch(session, decode))
    with testclient.TestClient(make_app(completer, ServerOptions("demo", allow_hosts=("testserver",)))) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["demo", "demo:one"]
        # The second of equal requests uses the prefix of the first.
        for model in ("demo", "demo:one", "demo:one", "demo"):
            made = client.post("/v1/completions", json={**request, "model": model}).json()
            assert (made["model"], made["choices"][0]["text"]) == (model, wanted[model])
        refused = client.post("/v1/completions", json={**request, "model": "demo:two"})
        assert refused.status_code == 404 and "this server has 'demo', 'demo:one'" in refused.text
