"""The static form: fixed sizes, no state in the graph, and the host's loop over it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session, export
from exportable_cache.errors import BundleError, CacheFullError, InputError, UnsupportedModelError
from exportable_cache.models.experts import EXPERT_LINEAR
from exportable_cache.models.layers.specs import vocab_size_of
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.verification.verify import verify_session

from ..support.models import WINDOW, hybrid_model, tiny_model, tokens
from ..support.sessions import describe

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.options import ExecutorchOptions
from exportable_cache.backends.executorch.static.lower import Traced
from exportable_cache.backends.executorch.static.plan import StaticLayer, StaticPlan, check_plan
from exportable_cache.backends.executorch.static.program import static_programs
from exportable_cache.backends.executorch.static.runner import StaticRunner, mask, open_static
from exportable_cache.backends.registry import backend_for

CAPACITY, CHUNK = 32, 5
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ENCODER |= {"is_decoder": True, "max_position_embeddings": 64}


def program_of(model: PreTrainedModel, **cache: Any) -> Program:
    backend = backend_for("executorch")
    spec = backend.program_spec(ProgramSpec(CHUNK), ExecutorchOptions(form="static"))
    return Program(model, ExportableCache.from_model(model, CAPACITY, **cache), spec)


def session_of(
    model: PreTrainedModel, transposed: bool = False
) -> tuple[Session, StaticPlan, dict[str, ExportedProgram]]:
    program = program_of(model)
    graphs, plan, tables = static_programs(program, transposed)
    runner = StaticRunner(Traced(graphs), plan, tables, describe(program))
    return Session(runner, program.cache.layers, vocab_size_of(model), batch_size=1, target="executorch"), plan, graphs


@pytest.mark.parametrize(
    ("family", "transposed"),
    [
        ("llama", False),
        ("gemma3_text", True),
        *(
            pytest.param(family, transposed, marks=pytest.mark.full)
            for family in ("llama", "gemma3_text", "gpt_oss", "mistral", "cohere2", "gemma2")
            for transposed in (False, True)
            if (family, transposed) not in (("llama", False), ("gemma3_text", True))
        ),
    ],
)
def test_steps_equal_the_model_past_its_window(family: str, transposed: bool) -> None:
    model = tiny_model(family)
    session, _, _ = session_of(model, transposed)
    prompts = [3, CHUNK, 2 * CHUNK, 2 * WINDOW + 3]
    report = verify_session(session, model, prompts=prompts, decode_steps=WINDOW + 2)
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        # It counts from the length of its cache.
        ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}),
        # It counts from its padding index.
        ("roberta", ENCODER),
        # It gathers kinds of tokens by position.
        ("bert", ENCODER),
    ],
)
def test_learned_positions_are_an_input(family: str, sizes: dict[str, Any]) -> None:
    model = tiny_model(family, **sizes)
    session, plan, graphs = session_of(model)
    assert plan.inputs[:3] == ["input_ids", "positions", "full_attention"] and not plan.tables
    gathers = graphs["decode"].graph.find_nodes(op="call_function", target=torch.ops.aten.gather.default)
    assert all(node.args[2].meta["val"].dtype == torch.int64 for node in gathers) and (gathers or family != "bert")
    assert verify_session(session, model, prompts=[3, 2 * CHUNK], decode_steps=8).passed


def test_experts_in_four_bits_stay_integers() -> None:
    """OpenVINO takes quantized experts by their indices; as batched products they were refused."""
    model = tiny_model("mixtral", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    model = quantize(model, Quantization("4w", 32, experts="4w")).model
    session, _, graphs = session_of(model)
    assert len(graphs["decode"].graph.find_nodes(op="call_function", target=EXPERT_LINEAR)) == 2
    assert verify_session(session, model, prompts=[3, 2 * CHUNK], decode_steps=3).passed


def test_graphs_have_fixed_sizes_and_no_state_or_int64() -> None:
    _, plan, graphs = session_of(tiny_model("gemma3_text"), transposed=True)
    assert plan.masks == ["full_attention", "sliding_attention"]
    assert plan.tables == ["rope_0_cos", "rope_0_sin", "rope_1_cos", "rope_1_sin"]
    for name, length in (("prefill", CHUNK), ("decode", 1)):
        graph = graphs[name]
        assert not graph.range_constraints and not graph.graph_signature.buffers_to_mutate
        inputs = {node.name: node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")}
        given = {one: inputs[one] for one in plan.inputs}
        assert {one.dtype for one in given.values()} == {torch.int32, torch.float32}
        assert tuple(given["layers_1_keys"].shape) == (1, 2, 8, CAPACITY)
        assert tuple(given["layers_1_values"].shape) == (1, 2, CAPACITY, 8)
        called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        assert not [
            one for one in called if any(part in one for part in ("index_put", "scatter", "where", "cos", "sin"))
        ]
        outputs = [node.meta["val"].shape for node in graph.graph.output_node().args[0]]
        assert [tuple(one) for one in outputs[1:3]] == [(1, 2, 8, length), (1, 2, length, 8)]


def test_a_mask_hides_what_a_ring_holds_no_longer() -> None:
    _, plan, _ = session_of(tiny_model("mistral"))
    (layer,) = set(plan.layers)
    assert (layer.window, layer.slots) == (WINDOW, WINDOW)
    seen = mask(layer, 11, 3, torch.float32)[0, 0] == 0
    # Slots hold positions 8, 9, 10 and 3 to 7, and queries are at 11 to 13.
    held = [8, 9, 10, 3, 4, 5, 6, 7, 11, 12, 13]
    assert seen.tolist() == [[query - WINDOW < key <= query for key in held] for query in (11, 12, 13)]
    assert (mask(layer, 0, 2, torch.float32)[0, 0] == 0).tolist() == [
        [False] * 8 + [True, False],
        [False] * 8 + [True] * 2,
    ]


def test_sessions_fork_and_take_tokens_back() -> None:
    model = tiny_model("llama")
    session, _, _ = session_of(model)
    ids = tokens(12)
    session.prefill(ids[:, :8])
    fork = session.fork()
    expected = session.decode(ids[:, 8])
    session.decode(ids[:, 9])
    torch.testing.assert_close(fork.decode(ids[:, 8]), expected)
    session.rewind(2)
    torch.testing.assert_close(session.decode(ids[:, 8]), expected)


@pytest.mark.parametrize(
    ("family", "overrides", "cache", "said"),
    [
        ("mamba", {"state_size": 4}, {}, "layer 0 of MambaForCausalLM is"),
        ("llama", {}, {"kv_dtype": "int8"}, "float keys and values, and layer 0"),
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 64}, {}, "must return cosines and sines"),
    ],
)
def test_what_the_form_lacks_is_refused_by_name(
    family: str, overrides: dict[str, Any], cache: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        static_programs(program_of(tiny_model(family, **overrides), **cache), False)
    assert "without form='static'" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"form": "dynamic"}, "form must be one of"),
        ({"keys": "transposed"}, "keys must be 'rows' without form='static'"),
        ({"form": "static", "kernels": "native"}, "kernels must be left out with form='static', got 'native'"),
        ({"form": "static", "shift": True}, "shift must be left out"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ExecutorchOptions(**options)


def test_several_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch_size must be"):
        export(tiny_model("llama"), "executorch", CAPACITY, tmp_path / "x", batch_size=2, form="static")


def test_the_remedy_for_rows_and_caches_names_the_form(tmp_path: Path) -> None:
    """A dry run refuses what the export would."""
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"batch_size": 2}, "leave out form='static'"),
        ({"kv_dtype": "int8"}, "kv_dtype must be left out with form='static', got 'int8'"),
        ({"attention_sinks": 4, "attention_window": 8}, "attention_sinks must be left out with form='static', got 4"),
    )
    for options, said in cases:
        with pytest.raises(InputError, match=said):
            export("demo", "executorch", CAPACITY, tmp_path / "x", form="static", dry_run=True, **options)


_LAYER = StaticLayer("full_attention", 8, None, 2, 4, 4)
_STATE = {"shape": [1, 2, 8, 4], "dtype": "float32"}


@pytest.mark.parametrize(
    ("plan", "state"),
    [
        ({"slots": 0}, {}),
        ({"heads": -1}, {}),
        ({"window": 0}, {}),
        ({"mask": "chunked_attention"}, {}),
        ({}, {"values": None}),
        ({}, {"keys": {**_STATE, "dtype": "nn"}}),
        ({}, {"keys": {**_STATE, "shape": [1, 2, 9, 4]}}),
        ({"tables": ["rope_0_cos", "rope_0_cos"]}, {}),
    ],
)
def test_parts_of_a_plan_are_checked(plan: dict[str, Any], state: dict[str, Any]) -> None:
    """Each changed field is refused; the plan without changes is not."""
    recorded = {"tensors": {"keys": _STATE, "values": _STATE}}
    tables = {"rope_0_cos": torch.zeros(8, 4)}
    names = plan.pop("tables", list(tables))
    check_plan(StaticPlan([_LAYER], list(tables), False, False), [recorded], tables)
    changed = StaticPlan([replace(_LAYER, **plan)], names, False, False)
    with pytest.raises(BundleError, match="of the static form"):
        check_plan(changed, [{"tensors": {**recorded["tensors"], **state}}], tables)


def test_a_step_past_the_rotary_tables_is_refused() -> None:
    """With windows in all layers a session has no limit, but the tables end."""
    description: Any = SimpleNamespace(layers=[{"tensors": {"keys": _STATE, "values": _STATE}}], methods={})
    plan = StaticPlan([_LAYER], ["rope_0_cos"], False, False)
    unused: Any = None
    runner = StaticRunner(unused, plan, {"rope_0_cos": torch.zeros(8, 4)}, description)
    with pytest.raises(CacheFullError, match="tables end at position 8, and a step of 2 tokens begins at 7"):
        runner.run("prefill", torch.zeros(1, 2, dtype=torch.int64), torch.tensor([7]))
    with pytest.raises(BundleError, match=r"rope_0_cos must be a table \[positions, size\], got \[8\]"):
        StaticRunner(unused, plan, {"rope_0_cos": torch.zeros(8)}, description)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("static") / "bundle"
    # A ring alone: what each layer computes is tested on the graphs, above.
    model = hybrid_model(num_hidden_layers=1, layer_types=["sliding_attention"])
    return export(
        model, "executorch", CAPACITY, folder, prefill_chunk=CHUNK, form="static", keys="transposed", quantize="8da4w"
    )


def test_a_bundle_is_verified_in_the_runtime(bundle: Any) -> None:
    assert bundle.manifest.verification["passed"]
    assert len({(bundle.path / name).stat().st_mode for name in ("program.pte", "rope.safetensors")}) == 1
    # XNNPACK computes all but what it does not take, such as tables with 8 bits.
    assert bundle.manifest.options == {"form": "static", "keys": "transposed"}
    with Session.from_bundle(bundle) as session:
        ids = tokens(2 * CHUNK + 1)
        logits = session.prefill(ids)
        session.reset()
        session.prefill(ids[:, :-1])
        torch.testing.assert_close(session.decode(ids[:, -1]), logits, rtol=0, atol=0.5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers": []}, "other tables or layers"),
        ({"tables": ["rope_0_cos"]}, "other tables or layers"),
        ({"layers": "many"}, "cannot be read"),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error(bundle: Any, changed: dict[str, Any], said: str) -> None:
    description = bundle.manifest.description()
    details = {**description.details["program.pte"]["static"], **changed}
    description.details["program.pte"] = {"static": details}
    with pytest.raises(BundleError, match=said):
        open_static(bundle.path / "program.pte", bundle.path / "rope.safetensors", description)


def test_models_that_derive_positions_themselves_are_refused(tmp_path: Path) -> None:
    """MPT makes its biases from the number of keys."""
    model = tiny_model("mpt", d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=64)
    with pytest.raises(UnsupportedModelError, match="computes something else in the static form"):
        export(model, "executorch", CAPACITY, tmp_path / "b", form="static")
