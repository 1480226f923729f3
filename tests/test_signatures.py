"""No function takes more than six arguments, but those that users call and those whose signature is
decided elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import exportable_cache

pytestmark = pytest.mark.project

LIMIT = 6
PACKAGE = Path(exportable_cache.__file__).parent

#: What users call with keywords; behind them stands one spec.
PUBLIC = (
    "pipeline/export.py:export",
    "models/cache_factory.py:ExportableCache.from_config",
    "bundle/bundle.py:Bundle.open",
    "models/cache_factory.py:ExportableCache.from_model",
    "session/native.py:open_native",
    "session/session.py:Session.__init__",
    "session/session.py:Session.from_model",
    "session/session.py:Session.generate",
    "session/session.py:Session.stream_text",
    "session/session.py:load",
    "generation/loop.py:generate_tokens",
    "verification/verify.py:verify",
    "generation/speculative.py:generate_speculative",
)

#: Signatures that are decided elsewhere, and by whom.
DICTATED = {
    "backends/executorch/native/operators.py:attention": "the operator's schema, which files name",
    "backends/live/ops/attention.py:_of_torch": "arguments of torch's scaled_dot_product_attention",
    "backends/live/ops/attention.py:attention": "the operator's schema, which graphs name",
    "cache/attention/operators.py:_plainly": "the operator's schema, which graphs name",
    "cache/attention/filled_triton.py:_attend_part": "a kernel's operands, each a pointer or a number",
    "cache/attention/filled_triton.py:_merge_parts": "a kernel's operands, each a pointer or a number",
    "cache/attention/filled_triton.py:filled_attention": "the operator's schema, which graphs name",
    "cache/attention/functions.py:_plainly": "the operator's schema, see cache/attention/functions.py",
    "cache/attention/functions.py:fused_attention": "transformers' AttentionInterface",
    "cache/attention/functions.py:matmul_attention": "transformers' AttentionInterface",
    "cache/attention/masks.py:position_mask": "transformers' AttentionMaskInterface",
    "backends/coreai/convert.py:_dequantize": "the schema of torchao's operator",
    "backends/tensorrt/quantized.py:dequantize_affine": "the schema of torchao's operator",
    "models/quantized_rows.py:QuantizedWeight.__new__": "the constructor of torchao's IntxUnpackedToInt8Tensor",
    "models/experts.py:expert_linear": "the operator's schema, which graphs name",
    "models/experts.py:experts_output": "the operator's schema, which graphs name",
    "models/patches/mechanisms/fused_attention.py:_falcon_attention": "the forward of transformers' FalconAttention",
    "models/patches/families/deepseek_v4.py:_model": "the forward of transformers' DeepseekV4Model, and the original",
    "models/patches/families/git.py:_git_text": "the forward of transformers' GitModel, and the original",
    "models/patches/families/openai_gpt.py:_gpt": "the forward of transformers' OpenAIGPTModel, and the original",
    "models/patches/families/openai_gpt.py:_xlm": "the forward of transformers' XLMModel, and the original",
    "models/patches/mechanisms/masks.py:_kosmos_text": "the forward of transformers' Kosmos-2 text model",
    "models/patches/families/prophetnet.py:_decoder": "the forward of transformers' ProphetNetDecoder",
    "models/scans.py:delta_rule": "operands of transformers' torch_chunk_gated_delta_rule",
    "models/scans.py:selective_scan": "operands of transformers' mamba_selective_scan",
    "models/scans.py:state_space_scan": "operands of transformers' mamba_chunk_scan_combined",
    "cli/device.py:adapter": "typer: its parameters are the command's options",
    "cli/bench.py:bench": "typer: its parameters are the command's options",
    "cli/chat.py:chat": "typer: its parameters are the command's options",
    "cli/verify.py:perplexity": "typer: its parameters are the command's options",
    "cli/generate.py:generate": "typer: its parameters are the command's options",
    "cli/device.py:package": "typer: its parameters are the command's options",
    "cli/serve.py:serve": "typer: its parameters are the command's options",
}


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name inside the module, such as `Session.prefill`; nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from functions(node, f"{prefix}{node.name}." if inside else prefix)


def count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named arguments besides self and cls."""
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def long_ones(package: Path) -> dict[str, int]:
    """`file:function` of all that take more than the limit, with how many."""
    return {
        f"{path.relative_to(package).as_posix()}:{name}": count(function)
        for path in sorted(package.rglob("*.py"))
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if count(function) > LIMIT
    }


def test_no_function_takes_more_arguments_than_the_limit() -> None:
    excused = {*PUBLIC, *DICTATED}
    found = long_ones(PACKAGE)
    assert {name: many for name, many in found.items() if name not in excused} == {}


def test_the_lists_hold_nothing_that_is_short_by_now() -> None:
    assert sorted({*PUBLIC, *DICTATED} - long_ones(PACKAGE).keys()) == []


def test_long_signatures_are_seen(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(
        "class A:\n"
        "    def six(self, a, b, c, /, d, *rest, e, f, **more): ...\n"
        "    def seven(self, a, b, c, /, d, *, e, f, g): ...\n"
        "def outer():\n"
        "    if True:\n"
        "        def inner(a, b, c, d, e, f, g): ...\n"
    )
    assert long_ones(tmp_path) == {"some.py:A.seven": 7, "some.py:outer.inner": 7}
