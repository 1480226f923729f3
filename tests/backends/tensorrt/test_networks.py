"""Networks of whole programs, evaluated on the CPU: against the model, and what they consist of."""

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.verification.verify import verify_session

from ...support.kinds import kind_model
from ...support.models import WINDOW, among

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.kv_cache import EngineLayout
from exportable_cache.backends.tensorrt.network import Network
from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.target import (
    engine_networks,
    engine_program_spec,
    methods_by_engine,
    program_networks,
)

from .models import engine_model
from .programs import engine_program, network_session, program_of

# Family -> full layers; the others are rings.
FAMILIES = {"llama": 2, "mistral": 0, "gemma3_text": 1, "qwen3": 2, "gpt_oss": 1, "deepseek_v3": 2, "mixtral": 2}
LAYERS = 2
#: A ring and a full layer.
FAST = ("gemma3_text",)


@pytest.mark.parametrize("family", among(FAMILIES, fast=FAST))
def test_networks_equal_the_model(family: str) -> None:
    model, program, networks = engine_program(family)
    report = verify_session(network_session(model, program, networks), model, tolerance=1e-4)
    assert report.passed, str(report)
    assert min(prompt.decode_steps for prompt in report.prompts[:-1]) >= 24
    assert report.windows == ((WINDOW,) if FAMILIES[family] < LAYERS else ())


@pytest.mark.parametrize("engines", among(["shared", "separate"], fast=["shared"]))
@pytest.mark.parametrize("family", among(FAMILIES, fast=FAST))
def test_the_layer_census(family: str, engines: str) -> None:
    _, program, networks = engine_program(family, engines=engines)
    assert sorted(networks) == ["decode", "prefill"]
    shares = networks["decode"].definition is networks["prefill"].definition
    assert shares is (engines == "shared")
    for method, network in networks.items():
        # A ring's one-token write is an update in place; what a prompt leaves in it is gathered.
        updated = LAYERS if method == "decode" and not shares else FAMILIES[family]
        assert network.layer_counts.get("KV_CACHE_UPDATE", 0) == 2 * updated
        assert len(network.aliases) == 2 * updated
        assert network.layer_counts["ATTENTION_INPUT"] == LAYERS
        assert all(output == "next." + name.removeprefix("cache.") for output, name in network.aliases.items())


# In the fast lane a state of fixed size is in bfloat16, below.
@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float16), ("gemma3_text", torch.bfloat16)],
)
def test_half_precision(family: str, dtype: torch.dtype) -> None:
    model, program, networks = engine_program(family, dtype)
    report = verify_session(network_session(model, program, networks), model)
    assert report.passed, str(report)
    # Everything that is not a position, a mask or a sum stays in the model's dtype.
    kept = {spec.dtype for spec in networks["decode"].inputs if spec.name.startswith("cache.")}
    assert kept == {dtype}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("lfm2", torch.bfloat16, marks=pytest.mark.full),
        pytest.param("mamba2", torch.float32, marks=pytest.mark.full),
        pytest.param("falcon_h1", torch.float32, marks=pytest.mark.slow),
        pytest.param("jamba", torch.float32, marks=pytest.mark.slow),
        pytest.param("qwen3_next", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_states_of_fixed_size(family: str, dtype: torch.dtype) -> None:
    model = kind_model(family).to(dtype)
    program = program_of(model)
    networks = engine_networks(program, TensorRTOptions())
    report = verify_session(network_session(model, program, networks), model, prompts=[5, 20], decode_steps=8)
    assert report.passed, str(report)
    # Each state goes in and comes out; only keys and values of plain layers are written in place.
    states = [name for name, _ in program.cache.named_state() if not name.endswith("cumulative_length")]
    full = [layer for layer in program.cache.layers if isinstance(layer.layout, EngineLayout)]
    for network in networks.values():
        assert [name.removeprefix("next.") for name in network.outputs[2:]] == states
        assert len(network.aliases) == 2 * len(full)


@pytest.mark.parametrize("family", among(["gemma3_text", "mistral"], fast=[]))
def test_rows_of_a_batch(family: str) -> None:
    model, program, networks = engine_program(family, batch_size=2)
    report = verify_session(
        network_session(model, program, networks), model, tolerance=1e-4, prompts=[3, 20], decode_steps=8
    )
    assert report.passed, str(report)


def test_methods_that_share_a_network_have_their_own_lengths() -> None:
    """TensorRT gets an optimization profile for each."""
    _, _, networks = engine_program("gemma3_text")
    shapes = {
        name: (inputs[0].min_shape, inputs[0].opt_shape, inputs[0].max_shape)
        for name, inputs in ((name, network.inputs) for name, network in networks.items())
    }
    assert shapes == {"decode": ((1, 1),) * 3, "prefill": ((1, 2), (1, 16), (1, 16))}
    # The cache has one shape in both.
    assert networks["decode"].inputs[2:] == networks["prefill"].inputs[2:]


def test_a_tied_table_is_one_constant() -> None:
    """Count the constants that equal the table of Gemma 3, which is tied to the head."""
    model, _, networks = engine_program("gemma3_text")
    table = model.get_input_embeddings().weight
    for network in networks.values():
        assert sum(torch.equal(one, table) for one in network.constants.values()) == 1


# In the fast lane: the constants of a network, above.
@pytest.mark.full
@pytest.mark.parametrize("score_length", [0, 3])
def test_a_plan_has_a_tied_table_once(score_length: int) -> None:
    """Build a plan most of whose weights are a tied table, and compare its size with theirs."""
    sizes = {"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1}
    model = engine_model("llama", torch.float16, tie_word_embeddings=True, **sizes)
    options = TensorRTOptions(score_length=score_length)
    networks = engine_networks(program_of(model, options=options), options)
    (methods,) = methods_by_engine(networks)
    profiles = [networks[method].inputs for method in methods]
    size = len(networks[methods[0]].build_plan((), profiles))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights < size < 1.15 * weights


@pytest.mark.full
def test_recurrent_layers_have_an_engine_for_each_method() -> None:
    """A scan over one token takes longer than a step."""
    networks = engine_networks(program_of(kind_model("lfm2")), TensorRTOptions())
    assert networks["decode"].definition is not networks["prefill"].definition


def test_scatters_instead_of_updates_in_place() -> None:
    model, program, networks = engine_program("llama", in_place=False)
    for network in networks.values():
        assert network.aliases == {}
        assert network.layer_counts["SCATTER"] == 2 * LAYERS and "KV_CACHE_UPDATE" not in network.layer_counts
    assert verify_session(
        network_session(model, program, networks), model, tolerance=1e-4, prompts=[3, 20], decode_steps=8
    ).passed


def test_networks_of_one_model_share_their_weights() -> None:
    """Joined queries, keys and values, too: the second network adds fewer bytes than those of one layer."""
    model, _, networks = engine_program("llama", in_place=False)
    first, second = (
        {one.data_ptr(): one.nbytes for one in network.constants.values()} for network in networks.values()
    )
    attention = model.model.layers[0].self_attn
    joined = sum(one.weight.nbytes for one in (attention.q_proj, attention.k_proj, attention.v_proj))
    assert list(first.values()).count(joined) >= LAYERS
    assert sum(size for address, size in second.items() if address not in first) < joined


def test_norms_rotations_and_softmax_of_16_bits_are_float32() -> None:
    """Compare the dtypes of sums, roots, sines and softmax; the products stay in 16 bits."""
    _, _, networks = engine_program("llama", torch.float16)
    from exportable_cache.backends.tensorrt.network import layer_kind

    definition = networks["decode"].definition
    kinds: dict[str, set[str]] = {}
    for index in range(definition.num_layers):
        layer = definition.get_layer(index)
        kinds.setdefault(layer_kind(layer), set()).add(layer.get_output(0).dtype.name)
    assert {kind: kinds[kind] for kind in ("REDUCE", "SOFTMAX", "MATRIX_MULTIPLY")} == {
        "REDUCE": {"FLOAT"},
        "SOFTMAX": {"FLOAT"},
        "MATRIX_MULTIPLY": {"HALF"},
    }
    # Roots and sines; integers are of the positions.
    assert "HALF" not in kinds["UNARY"] and "FLOAT" in kinds["UNARY"]


def test_grouped_keys_reach_the_attention_layer_unexpanded() -> None:
    _, _, networks = engine_program("llama", in_place=False)
    from exportable_cache.backends.tensorrt.network import layer_kind

    definition = networks["decode"].definition
    layers = [definition.get_layer(index) for index in range(definition.num_layers)]
    shapes = [
        [tuple(layer.get_input(index).shape) for index in range(3)]
        for layer in layers
        if layer_kind(layer) == "ATTENTION_INPUT"
    ]
    assert shapes == [[(1, 4, 1, 8), (1, 2, 64, 8), (1, 2, 64, 8)]] * LAYERS


@pytest.mark.full
def test_networks_are_kept_with_their_options() -> None:
    """Verification reads the network that was built, and a second export of the program with other options gets its
    own.
    """
    program = program_of(engine_model("llama", num_hidden_layers=1))

    def opt_shape(**options: int) -> tuple[int, ...]:
        return program_networks(program, TensorRTOptions(**options))["prefill"].inputs[0].opt_shape

    assert opt_shape(opt_length=4) == (1, 4) and opt_shape(opt_length=8) == (1, 8)
    options = TensorRTOptions(opt_length=4)
    assert program_networks(program, options) is program_networks(program, options)
    assert program_networks(program, options, in_place=False)["decode"].aliases == {}


def test_the_same_program_has_the_same_digest_and_other_weights_another() -> None:
    model = engine_model("llama", num_hidden_layers=1)

    def made() -> dict[str, Network]:
        cache = ExportableCache.from_model(model, 16, attn_implementation=None)
        return engine_networks(Program(model, cache, engine_program_spec(ProgramSpec(1))), TensorRTOptions())

    networks, again = made(), made()
    assert {name: network.digest for name, network in again.items()} == {name: n.digest for name, n in networks.items()}
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    changed = made()
    assert networks and all(changed[name].digest != network.digest for name, network in networks.items())


def test_float32_products_stay_float32() -> None:
    """TensorRT takes TF32 unless told otherwise, whose 10 bits the evaluator would not see."""
    from exportable_cache.backends.tensorrt.upstream import trt

    _, _, networks = engine_program("gemma3_text")
    interpreter = networks["decode"].interpreter
    assert interpreter.builder.create_builder_config().get_flag(trt.BuilderFlag.TF32)
    assert not interpreter._populate_trt_builder_config().get_flag(trt.BuilderFlag.TF32)
