"""Patched methods compute what the originals do, and each original still needs its patch."""

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from exportable_cache import ExportableCache
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.models.patches.families import git, mpt, xmod
from exportable_cache.models.patches.mechanisms import experts, masks, position_tables
from exportable_cache.models.patches.registry import patch_model
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.models import among
from ..zoo.architectures import architectures
from ..zoo.build import STEPS, cached_logits, tiny_model, tokens

#: Model type -> the patched class it shows, and a method whose tracing needs it. NLLB-MoE, Pix2Struct and Switch are in
#: the zoo, BLIP is in test_encoder_inputs.py.
SHOWN = {
    "mvp": ("MvpLearnedPositionalEmbedding", "decode"),
    "trocr": ("TrOCRLearnedPositionalEmbedding", "decode"),
    "musicgen": ("MusicgenSinusoidalPositionalEmbedding", "decode"),
    "musicgen_melody": ("MusicgenMelodySinusoidalPositionalEmbedding", "decode"),
    "dbrx": ("DbrxExperts", "decode"),
    "longcat_flash": ("LongcatFlashExperts", "decode"),
    "mpt": ("MptAttention", "prefill"),
    "git": ("GitModel", "prefill"),
    "step3p7": ("Step3p7Experts", "decode"),
}

#: Model type -> classes whose originals can be traced, but to tensors whose sizes depend on data.
SIZED_BY_DATA = {
    "big_bird": ["BigBirdModel"],
    "biogpt": ["BioGptModel"],
    "megatron-bert": ["MegatronBertModel"],
    "rembert": ["RemBertModel"],
    "xmod": ["XmodOutput"],
    "roformer": ["RoFormerModel", "RoFormerSinusoidalPositionalEmbedding"],
}

#: Model type -> classes whose originals ask for a value when they are traced, of which nothing depends.
ASKING = {"opt": ["OPTDecoder"]}


def model_of(model_type: str):
    return tiny_model(next(row for row in architectures() if row.model_type == model_type))


def program_of(model) -> Program:
    return Program(model, ExportableCache.from_model(model, 64, attn_implementation=None), ProgramSpec(16))


# Of the experts one is in the fast lane.
@pytest.mark.parametrize("model_type", among(SHOWN, fast=["mvp", "trocr", "dbrx", "mpt", "git"]))
@torch.no_grad()
def test_the_patched_program_is_the_model(model_type: str) -> None:
    model = model_of(model_type)
    ids = tokens(model)
    expected = cached_logits(model, ids, 6)
    program = program_of(model)
    assert SHOWN[model_type][0] in patch_model(model)
    prefill, decode = (program.export(name).module() for name in ("prefill", "decode"))
    rows = [prefill(ids[:, :6].clone(), torch.tensor([0]))]
    # Both modules write to the same buffers, those of the program that was exported.
    for position in range(6, 6 + STEPS):
        rows.append(decode(ids[:, position : position + 1].clone(), torch.tensor([position])))
    assert (torch.cat(rows) - expected).abs().max() <= 1e-4


@pytest.mark.canary
@pytest.mark.parametrize("model_type", SHOWN)
def test_the_original_still_cannot_be_traced(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once upstream can: then the family's entry in PATCHES can go."""
    name, method = SHOWN[model_type]
    model = model_of(model_type)
    program = program_of(model)
    (kind,) = {type(module) for module in model.modules() if type(module).__name__ == name}
    monkeypatch.setattr(kind, "forward", kind.forward._exportable_cache_original)
    with pytest.raises(UnsupportedModelError, match="cannot be traced"):
        program.export(method)


def sized_by_data(program: Program) -> list[str]:
    """Tensors of the method `decode` with a size that depends on data."""
    values = ((node.name, node.meta.get("val")) for node in program.export("decode").graph.nodes)
    return [name for name, value in values if isinstance(value, torch.Tensor) and free_unbacked_symbols(value)]


@pytest.mark.parametrize("model_type", SIZED_BY_DATA)
def test_no_size_depends_on_data(model_type: str) -> None:
    model = model_of(model_type)
    program = program_of(model)
    assert patch_model(model) == SIZED_BY_DATA[model_type]
    assert not sized_by_data(program)


@pytest.mark.canary
@pytest.mark.parametrize("model_type", SIZED_BY_DATA)
def test_upstream_still_has_sizes_that_depend_on_data(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once it has none: then the family's entry in PATCHES can go."""
    model = model_of(model_type)
    program = program_of(model)
    for name in SIZED_BY_DATA[model_type]:
        kind = next(type(module) for module in model.modules() if type(module).__name__ == name)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", kind.forward._exportable_cache_original)
            assert sized_by_data(program), name


def asking(program: Program) -> list[str]:
    """Nodes of the method `decode` that read a value."""
    return [node.name for node in program.export("decode").graph.nodes if str(node.target) == "aten.item.default"]


@pytest.mark.parametrize("model_type", ASKING)
@torch.no_grad()
def test_no_value_is_asked_for(model_type: str) -> None:
    model = model_of(model_type)
    ids, program = tokens(model), program_of(model)
    assert patch_model(model) == ASKING[model_type]
    assert not asking(program)
    prefill, decode = (program.export(name).module() for name in ("prefill", "decode"))
    rows = [prefill(ids[:, :6].clone(), torch.tensor([0])), decode(ids[:, 6:7].clone(), torch.tensor([6]))]
    assert (torch.cat(rows) - cached_logits(model, ids, 6)[:2]).abs().max() <= 1e-4


@torch.no_grad()
def test_opt_counts_positions_by_the_cache() -> None:
    """As BLIP-2 runs it, which hands on none."""
    model = model_of("opt")
    ids = tokens(model)[:, :7]
    expected = cached_logits(model, tokens(model), 6)[:2]
    cache = ExportableCache.from_model(model, 64)
    step = torch.compile(lambda ids: model(ids, past_key_values=cache).logits[:, -1], fullgraph=True, backend="eager")
    assert (torch.cat([step(ids[:, :6]), step(ids[:, 6:])]) - expected).abs().max() <= 1e-4


@pytest.mark.canary
@pytest.mark.parametrize("model_type", ASKING)
def test_upstream_still_asks_for_a_value(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once it does not: then the family's entry in PATCHES can go."""
    model = model_of(model_type)
    program = program_of(model)
    for name in ASKING[model_type]:
        kind = next(type(module) for module in model.modules() if type(module).__name__ == name)
        monkeypatch.setattr(kind, "forward", kind.forward._exportable_cache_original)
        assert asking(program), name


def test_every_patch_is_shown() -> None:
    by_name = {name for names in (*SIZED_BY_DATA.values(), *ASKING.values()) for name in names}
    shown = {kind for kind, _ in SHOWN.values()} | by_name
    families = (masks, experts, git, mpt, position_tables, xmod)
    labels = {patch.label for family in families for patches in family.PATCHES.values() for patch in patches}
    # Those that act over a cache are shown by test_static_caches.py, BLIP by test_encoder_inputs.py.
    over_a_cache = {
        "BlipTextEmbeddings",
        "Gemma4UnifiedModel",
        "Kosmos2TextTransformer",
        "KyutaiSpeechToTextModel",
        "MoshiModel",
    }
    # Those that act off the CPU are shown by tests/decoding/test_gpu_steps.py.
    on_a_gpu = {"Llama4TextExperts"}
    assert labels - shown - over_a_cache - on_a_gpu == {
        "NllbMoeExperts",
        "NllbMoeSparseMLP",
        "Pix2StructTextModel",
        "SwitchTransformersExperts",
        "SwitchTransformersTop1Router",
    }


def test_a_buffer_that_is_set_in_every_step_can_be_compiled() -> None:
    model = model_of("ctrl")
    assert patch_model(model) == ["CTRLModel"]
    step = torch.compile(lambda ids: model(ids, use_cache=False).logits, fullgraph=True, backend="eager")
    assert torch.equal(step(tokens()[:, :6]), model(tokens()[:, :6]).logits)


@pytest.mark.canary
def test_a_buffer_that_is_set_in_every_step_still_stops_dynamo() -> None:
    """Fails once TorchDynamo knows what `torch.nn.Buffer` adds: then CTRL needs no patch."""
    model = model_of("ctrl")
    declared = model.transformer.pos_encoding
    patch_model(model)
    step = torch.compile(lambda ids: model(ids, use_cache=False).logits, fullgraph=True, backend="eager")
    step(tokens()[:, :6])
    model.transformer.pos_encoding = declared
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="python_type"):
        step(tokens()[:, :6])


def test_models_that_compute_attention_themselves_take_our_masks() -> None:
    """Transformers will not switch them: without our name in their config, masks depend on data and tracing fails."""
    model = model_of("megatron-bert")
    assert not model._can_set_attn_implementation()
    program = program_of(model)
    assert "where" in str([node.name for node in program.export("decode").graph.nodes])
    assert model.config._attn_implementation == "eager"
