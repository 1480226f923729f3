"""Which tensors methods take, and how that reaches graphs and manifests."""

import torch

from exportable_cache import ExportableCache
from exportable_cache.bundle.manifest import MethodEntry, MethodIO
from exportable_cache.common.tensors import TensorSpec
from exportable_cache.program.methods import ProgramMethod
from exportable_cache.program.program import Program

from .support.models import tiny_model


def test_text_methods_take_ids_and_positions() -> None:
    assert ProgramMethod("decode", 1, 1).inputs == (
        TensorSpec("input_ids", "int64", ("batch", 1)),
        TensorSpec("input_pos", "int64", ("batch",)),
    )
    assert ProgramMethod("prefill", 2, 9).inputs[0].shape == ("batch", "length")
    assert ProgramMethod("prefill", 2, 9).dynamic_sizes == {"length": (2, 9)}
    assert ProgramMethod("decode", 1, 1, ranges={"tiles": (1, 4)}).dynamic_sizes == {}


def test_example_inputs_have_the_shapes_that_the_method_names() -> None:
    model = tiny_model("llama")
    program = Program(model, ExportableCache.from_model(model, 32, batch_size=2))
    extra = TensorSpec("features", "float32", ("batch", "tiles", 5))
    method = ProgramMethod(
        "prefill", 2, 9, inputs=(*ProgramMethod("prefill", 2, 9).inputs, extra), ranges={"tiles": (1, 4)}
    )
    shapes = [tuple(tensor.shape) for tensor in program.example_inputs(method)]
    assert shapes == [(2, 7), (2,), (2, 3, 5)]
    assert program.example_inputs(method)[2].dtype == torch.float32


def test_graph_inputs_are_named_after_the_method() -> None:
    model = tiny_model("llama")
    exported = Program(model, ExportableCache.from_model(model, 32)).export("prefill")
    assert exported.graph_signature.user_inputs == ("input_ids", "input_pos")


def test_a_manifest_gives_the_method_back_without_the_state() -> None:
    features = TensorSpec("features", "float32", ("batch", "tiles", 5))
    method = ProgramMethod(
        "encode",
        2,
        9,
        inputs=(TensorSpec("input_ids", "int64", ("batch", "length")),),
        ranges={"tiles": (1, 4)},
        outputs=(features,),
    )
    recorded = MethodEntry(
        min_length=2,
        max_length=9,
        ranges={"tiles": (1, 4)},
        inputs=[
            MethodIO(name="input_ids", dtype="int64", shape=["batch", "length"]),
            MethodIO(name="cache.layers.0.keys", dtype="float32", shape=["batch", 2, 8, 4]),
        ],
        outputs=[MethodIO(name="features", dtype="float32", shape=["batch", "tiles", 5])],
    )
    assert MethodEntry.model_validate_json(recorded.model_dump_json()).described("encode") == method
