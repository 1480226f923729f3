"""Every private name that common/compat uses is there, and of the kind that it is used as."""

from __future__ import annotations

import enum
import inspect
from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache.common import compat

# What has to hold of a name.
CALLABLE = "callable"
CLASS = "class"
VALUE = "value"
#: Of an object, not of its class.
FIELD = "field"


def takes(*names: str) -> tuple[str, ...]:
    """A function with at least these parameters."""
    return names


#: Module of common/compat -> name -> kind, or the parameters it must have.
NAMES: dict[str, dict[str, Any]] = {
    "torch_onednn": {
        "torch._inductor.mkldnn_ir.LinearUnary.create": takes("x", "w", "B", "attr", "scalars", "algorithm"),
        "torch._inductor.lowering.register_lowering": takes("aten_fn", "type_promotion_kind"),
        "torch._inductor.ir.TensorBox": CLASS,
    },
    "torch_aoti": {
        "torch._inductor.aot_compile": takes("gm", "args", "options"),
        "torch._inductor.package.package_aoti": takes("archive_file", "aoti_files"),
        "torch._inductor.cpp_builder.CppBuilder": takes("name", "sources", "BuildOption", "output_dir"),
        "torch._inductor.cpp_builder.CppBuilder.get_command_line": CALLABLE,
        "torch._inductor.cpp_builder.CppBuilder.get_target_file_path": CALLABLE,
        "torch._inductor.runtime.cache_dir_utils.cache_dir": CALLABLE,
    },
    "coreai": {"torch.ops.coreai.constexpr_blockwise_shift_scale": CALLABLE},
    # Its names are those of its patches, which have digests.
    "torch_loading": {},
    "torch_distributed": {
        "torch.distributed._functional_collectives.broadcast": takes("self", "src", "group"),
        "torch.distributed._functional_collectives.all_reduce": takes("self", "reduceOp", "group"),
        "torch.distributed._functional_collectives.wait_tensor": takes("tensor"),
        "torch.ops._c10d_functional.all_reduce": VALUE,
        "torch.ops._c10d_functional.wait_tensor": VALUE,
        "torch.distributed.distributed_c10d._register_process_group": CALLABLE,
        "torch.distributed.ProcessGroup._get_backend": CALLABLE,
        "torch.distributed.distributed_c10d._unregister_process_group": CALLABLE,
    },
    "torch": {
        "torch._check": takes("cond", "message"),
        "torch.ops.aten._reshape_copy": VALUE,
        "torch.ops.mkldnn._linear_pointwise": VALUE,
        "torch._C._nn.linear": CALLABLE,
        "torch._subclasses.fake_tensor.FakeTensor": CLASS,
        "torch._subclasses.fake_tensor.FakeTensorMode.cache_clear": CALLABLE,
        "torch._ops.OperatorBase": CLASS,
        "torch._ops.OpOverload": CLASS,
        "torch._C._aoti.AOTIModelPackageLoader.run": CALLABLE,
        "torch._C._aoti.AOTIModelPackageLoader.load_constants": CALLABLE,
        "torch._C._aoti.AOTIModelPackageLoader.get_constant_fqns": CALLABLE,
        "torch._export.serde.serialize.serialize": takes(
            "exported_program", "serialize_state_dict", "serialize_constants", "serialize_example_inputs"
        ),
        "torch._C.parse_schema": CALLABLE,
        "torch.utils._python_dispatch._disable_current_modes": CALLABLE,
        "torch.utils._pytree.tree_map": takes("func", "tree"),
        "torch.utils._pytree.tree_flatten": takes("tree"),
        "torch.utils._pytree.tree_unflatten": takes("leaves", "treespec"),
        "torch.fx.experimental.symbolic_shapes.is_concrete_int": takes("a"),
        "torch._dynamo.mark_dynamic": takes("t", "index", "min", "max"),
        "torch._dynamo.maybe_mark_dynamic": takes("t", "index"),
        "torch._dynamo.exc.TorchDynamoException": CLASS,
        "torch._inductor.list_mode_options": takes("mode"),
        "torch._inductor.config.save_config_portable": CALLABLE,
        "torch._dynamo.guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES": VALUE,
        "torch._library.register_fake_class": CALLABLE,
    },
    "transformers": {
        "transformers.distributed.pipeline_parallel.PipelineStage.layer_range_for_rank": takes("rank", "num_layers"),
        "transformers.PreTrainedConfig._attn_implementation": VALUE,
        "transformers.PreTrainedConfig._experts_implementation": VALUE,
        "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS": VALUE,
        "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": takes("self", "gate_up"),
        "transformers.cache_utils.CacheLayerMixin._layer_type": VALUE,
        "transformers.PreTrainedModel._can_set_attn_implementation": CALLABLE,
        "transformers.PreTrainedModel._get_dtype_plan": takes("self", "dtype"),
        "transformers.PreTrainedConfig._attn_implementation_internal": FIELD,
        "transformers.PreTrainedConfig._experts_implementation_internal": FIELD,
        "transformers.utils.hub.cached_files": takes(
            "_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"
        ),
        "transformers.models.speech_to_text.modeling_speech_to_text.Speech2TextPreTrainedModel."
        "_get_feat_extract_output_lengths": takes("self", "input_lengths"),
        "transformers.models.seamless_m4t.modeling_seamless_m4t.SeamlessM4TPreTrainedModel."
        "_compute_sub_sample_lengths_from_attention_mask": takes("self", "attention_mask"),
    },
    "executorch": {
        "executorch.exir.passes._quant_patterns_and_replacements": VALUE,
        "executorch.exir._serialize._program._get_extended_header": takes("program_data"),
        "executorch.exir._serialize._program.deserialize_pte_binary": takes("program_data"),
        "executorch.exir._serialize._flatbuffer_program._patch_generated_flatbuffer_aliases": takes(),
        "executorch.exir._serialize.generated.executorch_flatbuffer.Program.Program.GetRootAs": takes("buf"),
        "executorch.exir._serialize.generated.executorch_flatbuffer.DataSegment.DataSegment": CLASS,
        "executorch.extension.pybindings.portable_lib._get_operator_names": CALLABLE,
        "executorch.exir.backend.utils.is_same_node.cache_clear": CALLABLE,
        "executorch.exir.backend.utils.WhyNoPartition": CLASS,
        "executorch.extension.pybindings.portable_lib._get_registered_backend_names": CALLABLE,
        "executorch.exir.EdgeCompileConfig": takes("_check_ir_validity", "_skip_dim_order"),
    },
    "torch_tensorrt": {
        "torch_tensorrt.dynamo._settings.CompilationSettings": CLASS,
        "torch_tensorrt.dynamo.conversion._conversion.infer_module_output_dtypes": CALLABLE,
        "torch_tensorrt.dynamo.conversion._ConverterRegistry.DYNAMO_CONVERTERS": VALUE,
        "torch_tensorrt.dynamo.conversion._TRTInterpreter.TRTInterpreter": CLASS,
        "torch_tensorrt.dynamo.conversion._TRTInterpreter.TRTInterpreter._construct_trt_network_def": takes("self"),
        "torch_tensorrt.dynamo.conversion._TRTInterpreter.TRTInterpreter._populate_trt_builder_config": takes("self"),
    },
}
CASES = [(package, name) for package, names in NAMES.items() for name in names]


def found(name: str) -> Any:
    """The object of a dotted path: modules as far as there are any, attributes behind them."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def require(package: str) -> None:
    if (
        package not in ("torch_aoti", "torch_onednn", "torch_loading", "torch_distributed")
        and util.find_spec(package) is None
    ):
        pytest.skip(f"{package} is not installed")
    if package == "coreai":
        pytest.importorskip("coreai_torch._compression.custom_layers", reason="no coreai extra is installed")
    if package == "torch_tensorrt":
        pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")


@pytest.mark.parametrize(("package", "name"), CASES)
def test_the_name_is_there(package: str, name: str) -> None:
    require(package)
    kind = NAMES[package][name]
    if kind == FIELD:
        owner, _, field = name.rpartition(".")
        assert hasattr(found(owner)(), field)
        return
    value = found(name)
    if kind == CLASS:
        assert inspect.isclass(value) and not issubclass(value, enum.Enum)
    elif kind == CALLABLE:
        assert callable(value)
    elif kind != VALUE:
        assert set(kind) <= set(inspect.signature(value).parameters)


@pytest.mark.parametrize("package", NAMES)
def test_the_module_of_the_package_tells_of_each(package: str) -> None:
    """The table in its docstring: the name, and what happens without it."""
    text = Path(compat.__file__).with_name(f"{package}.py").read_text()
    for name in NAMES[package]:
        # Classes that are public themselves are told of by the private part.
        assert name.rsplit(".", 1)[-1] in text


def test_the_modules_are_of_these_packages() -> None:
    modules = {path.stem for path in Path(compat.__file__).parent.glob("*.py")}
    # What imports the compiler and cannot be named by one word has canaries of its own.
    assert modules == {"__init__", "torch_compile", *NAMES}


def test_a_new_config_has_fields_of_its_own() -> None:
    from transformers import LlamaConfig

    from exportable_cache.common.compat import transformers as private

    config = LlamaConfig()
    private.set_config_implementations(config, "eager", None)
    assert (
        private.config_implementations(config) == ("eager", None)
        and private.attention_implementation(config) == "eager"
    )


def test_a_graph_keeps_its_code_generator_under_this_name() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Identity()).graph
    assert isinstance(graph._codegen, torch.fx.graph.CodeGen)


def test_a_module_has_its_tensors_in_dictionaries() -> None:
    from exportable_cache.common.compat import torch as private

    module = torch.nn.BatchNorm1d(2)
    module.plain = torch.zeros(1)
    parameters, buffers, others = private.module_tensors(module)
    assert parameters["weight"] is module.weight and buffers["running_mean"] is module.running_mean
    assert others["plain"] is module.plain
    assert private.module_children(torch.nn.Sequential(module))["0"] is module


def test_a_module_keeps_its_hooks_under_these_names() -> None:
    from exportable_cache.common.compat import torch as private

    module = torch.nn.Identity()
    assert not private.has_hooks(module)
    for register in (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert private.has_hooks(module)
        handle.remove()
    assert not private.has_hooks(module)


def test_operators_of_the_edge_dialect_hold_the_operator_under_this_name() -> None:
    require("executorch")
    from executorch.exir.dialects._ops import ops

    from exportable_cache.common.compat.executorch import operator_of

    assert operator_of(ops.edge.aten.add.Tensor) is torch.ops.aten.add.Tensor


def test_readers_of_a_file_hold_their_table_under_this_name() -> None:
    require("executorch")
    from executorch.exir._serialize.generated.executorch_flatbuffer.DataSegment import DataSegment

    assert "self._tab" in inspect.getsource(DataSegment.Init)
