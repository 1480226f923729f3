"""Programs: both forms, both ways of tracing, saved and loaded; what they mutate and what they return."""

import functools

import pytest
import torch
from torch.export import ExportedProgram

from exportable_cache import ExportableCache
from exportable_cache.cache.attention.implementation import attention_of
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.program.decoders import methods_for
from exportable_cache.program.methods import ProgramMethod
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from .support.models import hybrid_model, tiny_model, tokens
from .support.oracle import difference, reference_logits

TOLERANCE = 1e-4
PREFILL = 16


def program_of(family: str, max_cache_len: int = 64, batch_size: int = 1, **options) -> Program:
    model = hybrid_model() if family == "hybrid" else tiny_model(family)
    return Program(model, ExportableCache.from_model(model, max_cache_len, batch_size), ProgramSpec(PREFILL, **options))


@functools.cache
def exported(family: str, form: str = "resident", strict: bool = False) -> tuple[Program, dict[str, ExportedProgram]]:
    """A program and its methods. What a test leaves in a resident cache lies behind position 0, where all begin."""
    program = program_of(family, form=form)
    return program, {name: program.export(name, strict=strict) for name in program.methods}


def stepper(program: Program, exported: dict[str, ExportedProgram]):
    """Feed exported methods piece by piece, in chunks a prefill takes."""
    modules = {name: item.module() for name, item in exported.items()}
    position, cache = 0, program.cache

    def step(ids: torch.Tensor) -> torch.Tensor:
        nonlocal position, cache
        for piece in ids.split(PREFILL, dim=1):
            inputs = (piece, torch.full((program.batch_size,), position))
            module = modules["decode" if piece.shape[1] == 1 else "prefill"]
            if program.form.value == "explicit":
                logits, cache = module(*inputs, cache)
            else:
                logits = module(*inputs)
            position += piece.shape[1]
        return logits

    return step


# With --full every family, form and way of tracing. In the fast lane also: rings and full layers in test_pt2.py.
@pytest.mark.parametrize(
    ("family", "form", "strict"),
    [
        pytest.param(family, form, strict, marks=() if pair else pytest.mark.full, id=f"{family}-{form}-{way}")
        for family, form, strict, way, pair in (
            ("mistral", "resident", False, "non-strict", False),
            ("mistral", "explicit", True, "strict", False),
            ("gemma3_text", "resident", True, "strict", False),
            ("gemma3_text", "explicit", False, "non-strict", False),
            ("mistral", "resident", True, "strict", False),
            ("mistral", "explicit", False, "non-strict", True),
            ("gemma3_text", "resident", False, "non-strict", False),
            ("gemma3_text", "explicit", True, "strict", False),
        )
    ],
)
def test_exported_methods_equal_the_model(family: str, form: str, strict: bool, tmp_path) -> None:
    program, methods = exported(family, form, strict)
    loaded = {}
    for name, method in methods.items():
        path = tmp_path / f"{name}.pt2"
        torch.export.save(method, path)
        loaded[name] = torch.export.load(path)
    if form == "resident":
        # Saved one by one, each method has a cache of its own: the other's is put under it, as a bundle does.
        for key in loaded["decode"].graph_signature.non_persistent_buffers:
            loaded["prefill"].constants[key] = loaded["decode"].constants[key]
    ids = tokens(40)
    # Shorter than the window, as long, and in two chunks.
    for prompt in (3, 8, 24):
        reference = reference_logits(program.model, ids, prompt)
        assert difference(stepper(program, loaded), reference, ids, prompt) <= TOLERANCE


def test_every_prompt_length_in_the_range_is_one_graph() -> None:
    program, methods = exported("mistral")
    (constraint,) = methods["prefill"].range_constraints.values()
    assert (constraint.lower, constraint.upper) == (2, PREFILL)
    ids = tokens(30)
    for prompt in range(2, PREFILL + 1):
        reference = reference_logits(program.model, ids[:, : prompt + 1], prompt)
        assert difference(stepper(program, methods), reference, ids[:, : prompt + 1], prompt) <= TOLERANCE


def test_explicit_form_names_its_state_and_mutates_nothing() -> None:
    program, methods = exported("hybrid", "explicit")
    decode = methods["decode"].run_decompositions({})
    assert not decode.graph_signature.buffers_to_mutate and not decode.graph_signature.user_inputs_to_mutate
    inputs = decode.graph_signature.user_inputs
    assert "cache_layers_0_keys" in inputs and "cache_layers_1_cumulative_length" in inputs
    cache = program.cache
    before = {name: tensor.clone() for name, tensor in cache.named_state()}
    _, after = decode.module()(tokens(1), torch.tensor([0]), cache)
    assert isinstance(after, ExportableCache) and after.cumulative_length.tolist() == [1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.named_state())


def test_explicit_cache_leaves_the_program_as_a_cache_that_goes_on_in_eager() -> None:
    program, methods = exported("hybrid", "explicit")
    model, ids = program.model, tokens(24)
    reference = reference_logits(model, ids, 12)
    _, cache = methods["prefill"].module()(ids[:, :12], torch.tensor([0]), program.cache)
    with torch.no_grad(), attention_of(model, "exportable_cache"):
        for position in range(12, 24):
            logits = model(ids[:, position : position + 1], past_key_values=cache).logits[:, -1]
            assert (logits - reference[:, position - 11]).abs().max() <= TOLERANCE


def test_resident_form_writes_in_place_and_holds_no_length() -> None:
    exported = program_of("hybrid").export("decode")
    written = [node for node in exported.graph.nodes if node.target is torch.ops.aten.index_copy_.default]
    assert len(written) == 4
    buffers = exported.graph_signature.inputs_to_buffers.values()
    assert {name for name in buffers if name.startswith("layers_")} == {
        f"layers_{index}_{name}" for index in range(2) for name in ("keys", "values")
    }
    assert len(exported.graph_signature.user_outputs) == 1


def test_positions_restart_and_rewind() -> None:
    _, methods = exported("mistral")
    modules = {name: method.module() for name, method in methods.items()}
    ids, zero = tokens(12), torch.tensor([0])
    first = modules["prefill"](ids, zero).clone()
    modules["decode"](tokens(1, seed=5), torch.tensor([12]))
    assert torch.equal(modules["prefill"](ids, zero), first)
    once = modules["decode"](ids[:, :1], torch.tensor([12])).clone()
    assert torch.equal(modules["decode"](ids[:, :1], torch.tensor([12])), once)


def test_rows_have_positions_of_their_own() -> None:
    program = program_of("hybrid", batch_size=2)
    decode = program.export("decode").module()
    lengths, rows = [20, 11], [tokens(20, seed=1), tokens(11, seed=2)]
    for step in range(20):
        token = torch.stack([row[0, min(step, row.shape[1] - 1)] for row in rows])[:, None]
        position = torch.tensor([min(step, length - 1) for length in lengths])
        logits = decode(token, position)
    for index, row in enumerate(rows):
        expected = reference_logits(program.model, row, row.shape[1])[0, 0]
        assert (logits[index] - expected).abs().max() <= TOLERANCE


def test_all_logits_when_asked_for() -> None:
    program = program_of("llama", logits="all")
    ids = tokens(9)
    logits = program.export("prefill").module()(ids, torch.tensor([0]))
    assert logits.shape == (1, 9, program.model.config.vocab_size)
    for length in (1, 4, 9):
        expected = reference_logits(program.model, ids[:, :length], length)[0, 0]
        assert (logits[0, length - 1] - expected).abs().max() <= TOLERANCE


def test_export_starts_from_zero_and_leaves_cache_and_model_alone() -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, 32)
    with torch.no_grad():
        model(tokens(5), past_key_values=cache)
    before = {name: tensor.clone() for name, tensor in cache.named_state()}
    model.set_attn_implementation("eager")
    program = Program(model, cache)
    exported = program.export("decode")
    assert not any(tensor.any() for _, tensor in program.cache.named_state())
    exported.module()(tokens(1), torch.tensor([0]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.named_state())
    assert model.config._attn_implementation == "eager"


def test_the_model_is_restored_when_tracing_fails() -> None:
    model = tiny_model("gpt_oss")
    own = model.config._attn_implementation, model.config._experts_implementation
    with pytest.raises(RuntimeError, match="stop"), attention_of(model, "exportable_cache_matmul", "batched_mm"):
        assert model.config._attn_implementation == "exportable_cache_matmul"
        raise RuntimeError("stop")
    assert (model.config._attn_implementation, model.config._experts_implementation) == own


def test_methods_follow_the_cache() -> None:
    llama, mistral = tiny_model("llama"), tiny_model("mistral")
    assert methods_for(ExportableCache.from_model(llama, 64))["prefill"] == ProgramMethod("prefill", 2, 64)
    assert methods_for(ExportableCache.from_model(llama, 4096))["prefill"] == ProgramMethod("prefill", 2, 256)
    assert methods_for(ExportableCache.from_model(mistral, 64))["prefill"] == ProgramMethod("prefill", 2, 256)
    assert set(methods_for(ExportableCache.from_model(llama, 64), ProgramSpec(1))) == {"decode"}
    with pytest.raises(InputError, match="prefill_chunk must be 1 to 64.*got 65"):
        methods_for(ExportableCache.from_model(llama, 64), ProgramSpec(65))
    for length in (0, -1, True, 1.5):
        with pytest.raises(InputError, match=f"prefill_chunk must be an int of at least 1, got {length}"):
            ProgramSpec(length)


def test_training_mode_is_refused() -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, 8)
    with pytest.raises(InputError, match="call model.eval"):
        Program(model.train(), cache)


def test_a_model_that_cannot_be_traced_is_refused_by_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    mlp = type(model.model.layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", lambda self, hidden: hidden if hidden.sum() > 0 else -hidden)
    program = Program(model, ExportableCache.from_model(model, 32))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be traced .decode: .*Session.from_model"):
        program.export("decode")


@pytest.mark.parametrize("length", [2, pytest.param(3, marks=pytest.mark.full)])
def test_short_dynamic_methods(length: int) -> None:
    model = tiny_model("mistral")
    program = Program(model, ExportableCache.from_model(model, 32), ProgramSpec(length, forward=True))
    ids = tokens(12)
    expected = reference_logits(model, ids, 1)[0]
    forward = program.export("forward").module()
    position = 0
    for size in [1, length] * 3:
        logits = forward(ids[:, position : position + size], torch.tensor([position]))
        position += size
        assert (logits[0] - expected[position - 1]).abs().max() <= TOLERANCE


def test_lengths_that_the_model_tells_apart_raise_the_shortest_prefill() -> None:
    """Code that compares the number of tokens with a constant holds from there on; a chunk below it is fed token by
    token.
    """
    model = tiny_model("llama", num_hidden_layers=1)

    def compare(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        assert hidden_states.shape[1] > 4

    program = Program(model, ExportableCache.from_model(model, max_cache_len=32), ProgramSpec(16))
    handle = model.model.layers[0].register_forward_pre_hook(compare, with_kwargs=True)
    exported = program.export("prefill")
    handle.remove()
    assert program.methods["prefill"].min_length == 5
    ids = tokens(5)
    expected = program.modules["prefill"](ids, torch.tensor([0]))
    assert (exported.module()(ids, torch.tensor([0])) - expected).abs().max() < 1e-5
