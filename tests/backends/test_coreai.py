"""Core AI programs, in Apple's runtime where its packages are installed, and the graphs that its converter gets."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.backends.coreai import convert as convert_file
from exportable_cache.backends.coreai import runner as runner_file
from exportable_cache.backends.coreai.convert import GatheredLayout, gathered_layers
from exportable_cache.backends.coreai.runner import CoreAIRunner
from exportable_cache.backends.decompositions import scatter_by_comparisons
from exportable_cache.bundle.manifest import Manifest
from exportable_cache.cache.layers import CacheLayer, RowSizes
from exportable_cache.cache.policies import FullPolicy, NoPolicy
from exportable_cache.cache.storage import FloatStorage
from exportable_cache.errors import BundleError, InputError, MissingDependencyError, UnsupportedModelError
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.program.program import Program

from ..support.models import hybrid_model, tiny_model, tokens
from ..support.multimodal import tiny_multimodal
from ..support.seq2seq import tiny_seq2seq
from ..support.sessions import quantized_model
from ..test_multimodal import largest_difference, options_of

HAS_COREAI = importlib.util.find_spec("coreai_torch") is not None
needs_coreai = pytest.mark.skipif(not HAS_COREAI, reason="the coreai extra is not installed")
LENGTH, WINDOW = 64, 16


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle of a ring and a full layer, verified in the runtime; its tokens depend on the cache."""
    folder = tmp_path_factory.mktemp("coreai") / "hybrid"
    export(hybrid_model(), target="coreai", max_cache_len=LENGTH, prefill_chunk=16, output_dir=folder)
    return folder


def live() -> Session:
    """Return a session over the model of `bundle`."""
    model = hybrid_model()
    return Session.from_model(model, ExportableCache.from_model(model, LENGTH))


# -- the runtime -------------------------------------------------------------------------------------------------------


@needs_coreai
def test_a_hybrid_generates_past_its_window(bundle: Path) -> None:
    """Export has compared its logits with the model's; here tokens are, over several chunks of a prompt."""
    prompt = tokens(29)
    with load(bundle, trust=True) as session:
        assert list(session.generate(prompt, 30)) == list(live().generate(prompt, 30))
        assert {method.name for method in session.runner.methods.values()} == {"prefill", "decode"}


@needs_coreai
def test_weights_are_stored_once_for_all_methods(bundle: Path) -> None:
    """Both functions have one copy of the weights, and their code."""
    weights = sum(parameter.nbytes for parameter in hybrid_model().parameters())
    size = (bundle / "program.aimodel" / "main.mlirb").stat().st_size
    assert size < 3 * weights


@needs_coreai
def test_quantized_weights_keep_their_bits(tmp_path: Path) -> None:
    """Export compares the runtime's logits with those of the quantized model in eager mode."""
    model = tiny_model("llama", hidden_size=128, intermediate_size=1024, num_hidden_layers=1)
    done = export(model, target="coreai", max_cache_len=32, prefill_chunk=8, quantize="8w", output_dir=tmp_path / "b")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert (done.path / "program.aimodel" / "main.mlirb").stat().st_size < 0.45 * weights
    assert done.manifest.verification["passed"]


@needs_coreai
def test_states_are_saved_forked_and_taken_back(bundle: Path, tmp_path: Path) -> None:
    """The runtime steps on with the cache tensors that a session has read or written."""
    prompt, expected = tokens(20), list(live().generate(tokens(20), 12))
    with load(bundle, trust=True) as session, load(bundle, trust=True) as other:
        session.prefill(prompt)
        session.save_state(tmp_path / "state")
        other.load_state(tmp_path / "state")
        first = torch.tensor([[expected[0]]])
        with other.fork() as forked:
            assert list(other.generate(first, 11)) == expected[1:]
            assert list(forked.generate(first, 11)) == expected[1:]
        session.decode(torch.tensor([5]))
        session.rewind(1)
        assert list(session.generate(first, 11)) == expected[1:]


# In the fast lane: the layout of its layers, below.
@pytest.mark.full
@needs_coreai
def test_rows_of_unequal_length(tmp_path: Path) -> None:
    """A program of two rows gives each row the tokens that it has alone."""
    model = tiny_model("llama")
    export(model, target="coreai", max_cache_len=LENGTH, batch_size=2, output_dir=tmp_path / "b", verify=False)
    prompts = [tokens(19)[0], tokens(7)[0]]
    with load(tmp_path / "b", trust=True) as session:
        rows = list(zip(*(step.tolist() for step in session.generate(prompts, 10)), strict=True))
    alone = Session.from_model(model, ExportableCache.from_model(model, LENGTH))
    for row, prompt in zip(rows, prompts, strict=True):
        alone.reset()
        assert list(row) == list(alone.generate(prompt[None], 10))


@needs_coreai
def test_a_caller_may_have_an_event_loop(bundle: Path) -> None:
    """Notebooks and servers run one in the thread that calls."""

    async def first_token() -> int:
        with load(bundle, trust=True) as session:
            return next(iter(session.generate(tokens(5), 1)))

    assert asyncio.run(first_token()) == next(iter(live().generate(tokens(5), 1)))


@needs_coreai
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list open files")
def test_a_closed_session_leaves_nothing_open(bundle: Path) -> None:
    """Neither files nor threads, however often a program is opened."""

    def opened() -> tuple[int, int]:
        with load(bundle, trust=True) as session:
            session.prefill(tokens(5))
        for thread in threading.enumerate():
            if thread.name == "Core AI":
                thread.join(10)
        return len(os.listdir("/proc/self/fd")), sum(one.name == "Core AI" for one in threading.enumerate())

    opened()
    assert opened() == opened()


@needs_coreai
def test_a_program_needs_trust_and_a_whole_file(bundle: Path, tmp_path: Path) -> None:
    """The runtime crashes on damaged files, so the bundle's digests are compared before it reads one."""
    with pytest.raises(BundleError, match="holds programs for Apple's Core AI runtime, .* load it with trust=True"):
        load(bundle)
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    program = copy / "program.aimodel" / "main.mlirb"
    program.write_bytes(program.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"program\.aimodel/main\.mlirb"):
        load(copy, trust=True)
    with pytest.raises(
        BundleError, match=r"missing must have a file main\.mlirb, and has none; export the model again"
    ):
        CoreAIRunner(tmp_path / "missing", Manifest.read(bundle).description())


@needs_coreai
def test_an_operator_without_a_form_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The converter's own sentence follows the method."""
    monkeypatch.setattr(convert_file, "_decompositions", dict)
    with pytest.raises(
        UnsupportedModelError, match="Core AI's converter refuses method 'decode': .*; export for another"
    ):
        export(tiny_model("llama", num_hidden_layers=1), target="coreai", max_cache_len=32, output_dir=tmp_path / "b")


@pytest.mark.parametrize(
    ("child", "reason"),
    [
        ("import os, signal; print('decode', flush=True); os.kill(os.getpid(), signal.SIGILL)", "ends with SIGILL"),
        ("print('decode', flush=True); raise ValueError('no such kernel')", "ValueError: no such kernel"),
    ],
)
def test_a_crash_of_the_runtime_is_a_sentence(
    child: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The runtime ends its process on some programs, so they are called in another one before they are kept."""
    model = tiny_model("llama")
    program = Program(model, ExportableCache.from_model(model, 32))
    monkeypatch.setattr(runner_file, "_CHILD", child)
    with pytest.raises(UnsupportedModelError, match=f"cannot run method 'decode' of LlamaForCausalLM: {reason};"):
        runner_file.check_calls(tmp_path, program)


@pytest.mark.skipif(HAS_COREAI, reason="the coreai extra is installed")
def test_the_extra_is_named(tmp_path: Path) -> None:
    """Without the packages the export ends before a model is loaded."""
    with pytest.raises(MissingDependencyError, match=r"pip install 'exportable-cache\[coreai\]'"):
        export(tiny_model("llama"), target="coreai", max_cache_len=32, output_dir=tmp_path / "b")


# Each takes some 10 s.
@needs_coreai
@pytest.mark.full
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "voxtral"])
def test_images_and_audio_equal_the_whole_model(family: str, tmp_path: Path) -> None:
    """Encoders are functions without states; prompts with one and two items."""
    model = tiny_multimodal(family)
    model.save_pretrained(tmp_path / family)
    bundle = export(tmp_path / family, "coreai", 96, tmp_path / "bundle", **options_of(family))
    with load(bundle.path, trust=True) as session:
        assert largest_difference(session, model, family) <= 1e-4


@needs_coreai
@pytest.mark.full
@pytest.mark.parametrize("family", ["whisper", "t5"])
def test_encoder_decoders_keep_what_a_prompt_wrote(family: str, tmp_path: Path) -> None:
    """Export compares every step with the model; a state has lengths of the encoder as int64."""
    longest = {} if family == "whisper" else {"max_encoder_len": 16}
    model = tiny_seq2seq(family)
    bundle = export(model, "coreai", 32, tmp_path / "bundle", prefill_chunk=8, **longest)
    assert bundle.manifest.verification["max_difference"] <= 1e-4
    with load(bundle.path, trust=True) as session:
        lengths = session.runner.state["layers.3.encoder_length"]
        assert lengths.dtype == torch.int64 and lengths.tolist() == [0]


# -- what the converter gets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 3, 8])
def test_a_gather_writes_as_the_portable_layout_does(start: int) -> None:
    """Several tokens of two rows, at the start, in the middle and up to the last slot."""
    generator = torch.Generator().manual_seed(0)
    found = []
    keys, values = (torch.randn(2, 3, 4, 8, generator=generator) for _ in range(2))
    for layout in (None, GatheredLayout()):
        layer = CacheLayer(FullPolicy(12), FloatStorage("float32"), RowSizes(2, 3, 8))
        layer.cumulative_length.fill_(start)
        if layout is not None:
            layer = layer.with_layout(layout, dict(layer.named_state()))
        seen = layer.update(keys, values)
        found.append([*seen, layer.keys, layer.values])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_layers_without_keys_stay_as_they_are() -> None:
    """Recurrent states have no slots; a cache of an encoder-decoder remains one."""
    model = tiny_model("llama")
    cache = ExportableCache([CacheLayer(NoPolicy()), *ExportableCache.from_model(model, 32).layers])
    adapted = gathered_layers(model, cache).layers
    assert adapted[0] is cache.layers[0]
    assert [type(layer.layout) for layer in adapted[1:]] == [GatheredLayout] * 2
    model = tiny_seq2seq("t5")
    cache = ExportableCache.from_model(model, 32, max_encoder_len=8)
    crossed = gathered_layers(model, cache)
    assert type(crossed) is type(cache) and crossed.encoder is cache.encoder
    assert {type(layer.layout) for layer in crossed.layers} == {GatheredLayout}


@pytest.mark.parametrize("source", [1.0, torch.arange(12.0).reshape(2, 3, 2)])
def test_scatter_by_comparisons(source: Any) -> None:
    """It equals torch's along the last dimension, and leaves other forms alone."""
    target, index = torch.randn(2, 3, 5), torch.tensor([[[0, 4], [2, 1], [3, 0]]]).expand(2, 3, 2)
    assert torch.equal(scatter_by_comparisons(target, -1, index, source), target.scatter(2, index, source))
    whole, number = target.int(), source.int() if isinstance(source, torch.Tensor) else source
    assert torch.equal(scatter_by_comparisons(whole, -1, index, number), whole.scatter(2, index, number))
    assert scatter_by_comparisons(target, 1, index, source) is NotImplemented


@pytest.mark.parametrize("divisor", [5, -5, torch.tensor([3, 7])])
def test_remainder_has_the_sign_of_the_divisor(divisor: Any) -> None:
    """Positions in a ring need the sign that torch gives."""
    values = torch.arange(-8, 8).reshape(-1, 1)
    assert torch.equal(convert_file._remainder(values, divisor), torch.remainder(values, divisor))


def test_gathered_layers_hold_what_others_do() -> None:
    """Rows of unequal length, in chunks that go past a ring's window."""
    model, prompts, following = tiny_model("gemma3_text"), tokens(29, 2), tokens(3, 2)
    given = torch.ones(2, 29, dtype=torch.int64)
    given[1, 7:] = 0
    found = []
    for adapt in (lambda model, cache: cache, gathered_layers):
        cache = adapt(model, ExportableCache.from_model(model, LENGTH, 2))
        session = Session.from_model(model, cache, prefill_chunk=16)
        found.append([session.prefill(prompts, given), *(session.decode(following[:, step]) for step in range(3))])
    assert all(isinstance(layer.layout, GatheredLayout) for layer in session.layers)
    torch.testing.assert_close(*map(torch.stack, found), atol=1e-5, rtol=0)


def test_weights_with_zero_points_are_refused() -> None:
    """The program has integers and scales only."""
    model = quantized_model(Quantization("8w", None, "8w"), tied=False).model
    check_symmetric = convert_file.check_symmetric
    check_symmetric(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_point[3] = 1
    with pytest.raises(UnsupportedModelError, match=r"zero points of model\.layers\.0\.mlp\.up_proj\.weight must be"):
        check_symmetric(model)


def test_integers_of_more_than_32_bits_are_refused() -> None:
    """Qwen 4 Exp has such multipliers for the hashes of n-grams; the converter makes them 32 bits."""
    model = tiny_model("llama")
    model.register_buffer("counts", torch.tensor([-(2**31), 2**31 - 1]))
    convert_file.check_integers(model)
    model.register_buffer("multipliers", torch.tensor([3, 2**31]))
    with pytest.raises(UnsupportedModelError, match="must have 32 bits for target coreai, and multipliers of LlamaFor"):
        convert_file.check_integers(model)


def test_new_states_have_fixed_sizes() -> None:
    """The converter forgets those of the last of a dynamic number of states; keys and values stay."""

    class Scans(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("layers_0_recurrent_state_0", torch.ones(2, 4))
            self.register_buffer("layers_1_keys", torch.zeros(2, 4))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            """Add to the state, and keep the last row."""
            states = given.cumsum(1) + self.layers_0_recurrent_state_0[:, None]
            self.layers_0_recurrent_state_0.copy_(states[:, -1])
            self.layers_1_keys.copy_(given[:, 0])
            return states

    given = torch.randn(2, 3, 4)
    length = torch.export.Dim("length", min=2, max=8)
    program = torch.export.export(Scans(), (given,), dynamic_shapes=({1: length},)).run_decompositions()
    convert_file._state_sizes(program)
    program.validate()
    written = {target: name for name, target in program.graph_signature.buffers_to_mutate.items()}
    nodes = {node.name: node for node in program.graph.nodes}
    views = {name: nodes[one].target is torch.ops.aten.view.default for name, one in written.items()}
    assert views == {"layers_0_recurrent_state_0": True, "layers_1_keys": False}
    module, expected = program.module(), Scans()
    assert torch.equal(module(given), expected(given)) and torch.equal(module(given), expected(given))


def test_rows_are_written_by_one_gather() -> None:
    """A dynamic number of rows, as an indexer writes them; other forms are left alone."""

    class Writes(torch.nn.Module):
        def forward(self, target: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            """Write rows at distinct places."""
            return torch.ops.aten.index_put(target, [None, index], rows)

    inputs = torch.randn(2, 8, 3), torch.tensor([5, 0, 6]), torch.randn(2, 3, 3)
    count = torch.export.Dim("count", max=8)
    exported = torch.export.export(Writes(), inputs, dynamic_shapes=(None, {0: count}, {1: count}))
    table = {torch.ops.aten.index_put.default: convert_file._index_put}
    for program, is_left in ((exported, False), (torch.export.export(Writes(), inputs), True)):
        decomposed = program.run_decompositions(table)
        assert any("index_put" in str(node.target) for node in decomposed.graph.nodes) is is_left
        assert torch.equal(decomposed.module()(*inputs), Writes()(*inputs))


@pytest.mark.parametrize(("dim", "keepdim"), [(None, False), ([-1], True), ([0, 2], False)])
@pytest.mark.parametrize("correction", [None, 0])
def test_variance(dim: list[int] | None, keepdim: bool, correction: int | None) -> None:
    """It equals torch's."""
    given = torch.randn(2, 3, 4)
    expected = torch.var(given, dim, correction=correction if correction is not None else 1, keepdim=keepdim)
    found = convert_file._variance(given, dim, correction=correction, keepdim=keepdim)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_attention_with_small_values_is_spelled_out(mask: torch.dtype | None) -> None:
    """The converter wants values of the queries' size."""
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 4)
    hidden = None if mask is None else torch.ones(3, 5).tril().to(mask)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=hidden, scale=0.3)
    torch.testing.assert_close(convert_file._attention(query, key, value, hidden, scale=0.3), expected)
    assert convert_file._attention(query, key, key) is NotImplemented


def test_what_no_operator_reads_is_left_out() -> None:
    """Complex numbers end the converter's process: those of a tower are left out, others are refused."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rotations", torch.ones(2, dtype=torch.complex64))
            self.register_buffer("state", torch.zeros(2))
            self.unused, self.scale = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            self.state.copy_(given)
            return given * self.scale

    class Rotating(Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return (given * self.rotations).real

    program = torch.export.export(Module(), (torch.ones(2),)).run_decompositions({})
    with pytest.raises(UnsupportedModelError, match="b_rotations in method 'decode' is complex"):
        convert_file.check_complex(program, "decode")
    convert_file.drop_unused(program)
    convert_file.check_complex(program, "decode")
    assert [spec.target for spec in program.graph_signature.input_specs] == ["scale", "state", None]
    assert torch.equal(program.module()(torch.full((2,), 3.0)), torch.full((2,), 3.0))
    program = torch.export.export(Rotating(), (torch.ones(2),)).run_decompositions({})
    convert_file.drop_unused(program)
    with pytest.raises(UnsupportedModelError, match="numbers must be real for target coreai"):
        convert_file.check_complex(program, "decode")


def test_numbers_are_folded() -> None:
    """A quantile of a constant becomes its value; tensors of more elements stay."""

    class Sparse(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            """Scale by a quantile, and add two numbers."""
            return given * torch.erfinv(2 * torch.tensor(0.95) - 1) + torch.tensor([1.0, 2.0])

    given = torch.ones(2)
    program = torch.export.export(Sparse(), (given,)).run_decompositions()
    convert_file._fold_numbers(program)
    assert not any("erfinv" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(given), Sparse()(given))


def test_operands_get_the_dimensions_of_the_result() -> None:
    """The converter reshapes operands with fewer dimensions wrongly if a size is dynamic."""

    class Added(torch.nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            """Add tensors of 1 and 2 dimensions, and choose by a scalar."""
            return torch.where(second > 0, second + first, first.sum())

    inputs = torch.arange(3.0), torch.tensor([[-1.0], [2.0]])
    program = torch.export.export(Added(), inputs)
    convert_file._align_ranks(program.graph_module)
    names = [node.name for node in program.graph.nodes if node.target is torch.ops.aten.unsqueeze.default]
    assert len(names) == 3
    assert torch.equal(program.module()(*inputs), Added()(*inputs))


def test_a_cache_tensor_that_is_only_read_is_refused() -> None:
    """It would be a constant of the program."""

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("layers_0_keys", torch.zeros(2))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            """Read the buffer."""
            return given + self.layers_0_keys

    program = torch.export.export(Reads(), (torch.zeros(2),))
    with pytest.raises(UnsupportedModelError, match="method 'decode' reads the cache tensor layers_0_keys without"):
        convert_file._states(program, "decode")
    convert_file.write_states(program)
    assert convert_file._states(program, "decode") == ["layers_0_keys"]


def test_states_that_a_step_only_reads_are_written_in_the_order_of_the_inputs() -> None:
    """The converter names states by their order."""

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("layers_0_keys", "layers_1_keys", "layers_2_keys"):
                self.register_buffer(name, torch.ones(2))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            """Write the second buffer and read the first and the second."""
            self.layers_1_keys.add_(given)
            return self.layers_0_keys + self.layers_1_keys

    program = torch.export.export(Step(), (torch.arange(2.0),)).run_decompositions()
    convert_file.write_states(program)
    names = ["layers_0_keys", "layers_1_keys", "layers_2_keys"]
    assert list(program.graph_signature.buffers_to_mutate.values()) == convert_file._states(program, "decode") == names
    module = program.module()
    assert torch.equal(module(torch.arange(2.0)), torch.tensor([2.0, 3.0]))
    assert {name: tensor.tolist() for name, tensor in module.named_buffers()} == {
        "layers_0_keys": [1, 1],
        "layers_1_keys": [1, 2],
        "layers_2_keys": [1, 1],
    }


def test_options_are_checked() -> None:
    """A bad value is refused when the options are made."""
    from exportable_cache.backends.coreai.target import CoreAIOptions

    with pytest.raises(InputError, match="score_length must be"):
        CoreAIOptions(score_length=1)


# -- what its workarounds are for --------------------------------------------------------------------------------------


@pytest.mark.canary
@needs_coreai
def test_the_converter_still_lacks_remainder() -> None:
    """Fails once it has it: then `_remainder` can go."""
    from coreai_torch import TorchConverter, get_decomp_table

    class Modulo(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            """Take the remainder of division by 5."""
            return torch.remainder(given, 5)

    program = torch.export.export(Modulo(), (torch.arange(3),)).run_decompositions(get_decomp_table())
    with pytest.raises(ValueError, match="remainder"):
        TorchConverter().add_exported_program(program).to_coreai()
