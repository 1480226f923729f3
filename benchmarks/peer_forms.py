"""Forms that benchmarks/peers.py compares: the model's variants, their environments, and how they are made and run.

This file has only names and settings, because the script of every environment imports it. benchmarks/peer_convert.py
makes a form's files, and benchmarks/peer_runtimes.py runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Range of the token ids that every form runs: spread over the vocabulary, the same everywhere.
VOCABULARY = 32000
#: Tokens of the check for equal logits: a prompt, then single tokens.
CHECKED_PROMPT, CHECKED_STEPS = 40, 16
#: Untimed tokens at the start of a turn, because other processes have used the caches and cores before.
UNTIMED = 2
#: Longest prompt chunk in our forms and in ExecuTorch's export; the others choose it themselves.
CHUNK = 256
#: Longest chunk in float32 with native operators, because a chunk reads the weights once. Peers need less memory.
LONG_CHUNK = 1024


def token_ids(count: int, first: int = 0) -> list[int]:
    """Return `count` ids from an offset on; a runtime may remember a prompt that begins as an earlier one did."""
    return [(7919 * index + 13) % (VOCABULARY - 16) + 8 for index in range(first, first + count)]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that the script makes; without packages, the current one.

    Attributes:
        first: Packages that pip installs first and alone, so that a locally configured build of torch is used.
        packages: Packages that it installs then.
        without: Dependencies to remove, because they are not needed and fail to load with another build of torch.
        releases: Distributions whose releases are printed with the figures.
        settings: Variables of pip's environment that say what is compiled.
    """

    first: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)


_TORCH = ("torch==2.13.0",)
_LLAMA_CPP = ("llama-cpp-python", "gguf", "safetensors")
_AVX2 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
ENVIRONMENTS = {
    "here": Environment(releases=("exportable-cache", "executorch", "torch")),
    "onnxruntime": Environment(
        _TORCH,
        ("onnxruntime-genai", "onnx", "onnx-ir", "transformers"),
        releases=("onnxruntime-genai", "onnxruntime"),
    ),
    "openvino": Environment(
        _TORCH, ("openvino-genai", "nncf", "optimum-intel"), ("torchvision",), ("openvino-genai", "openvino")
    ),
    "llama.cpp": Environment((), _LLAMA_CPP, releases=("llama-cpp-python",)),
    # Compiled for the processor at hand; this one runs with AVX-512 hidden.
    "llama.cpp-avx2": Environment(
        (),
        _LLAMA_CPP,
        releases=("llama-cpp-python",),
        settings={"CMAKE_ARGS": "-DGGML_NATIVE=OFF " + " ".join(f"-DGGML_{part}=ON" for part in _AVX2)},
    ),
}


@dataclass(frozen=True)
class Form:
    """One way to run the model.

    Attributes:
        title: Title of its row.
        environment: A name in `ENVIRONMENTS`.
        runtime: Its function in benchmarks/peer_convert.py, and its class in peer_runtimes.py.
        bits: Bits of its weights: 32, 16 for a bfloat16 checkpoint, or 4.
        options: Options for both.
        of: The form whose files it uses, if it has none.
    """

    title: str
    environment: str
    runtime: str
    bits: int
    options: dict[str, Any] = field(default_factory=dict)
    of: str | None = None

    @property
    def is_ours(self) -> bool:
        """True if the form is ours, which the others are compared with."""
        return self.runtime in ("ours", "runner")

    def checkpoint(self, slots: int) -> str:
        """Return the folder of the model that the form is made from."""
        return f"model-16-{slots}" if self.bits == 16 else f"model-{slots}"


_SMALL, _NATIVE = {"quantize": "8da4w"}, {"kernels": "native"}
_LONG = {"prefill_chunk": LONG_CHUNK}
_F32_KEYS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
FORMS = {
    "ours": Form("**ours, float32**", "here", "ours", 32),
    "ours-native": Form("**ours, float32, native operators**", "here", "ours", 32, {"export": {**_NATIVE, **_LONG}}),
    "ours-native-runner": Form(
        "**ours, float32, native operators, without torch**", "here", "runner", 32, of="ours-native"
    ),
    "executorch": Form("ExecuTorch's own export", "here", "executorch", 32),
    "onnxruntime": Form("ONNX Runtime GenAI, float32", "onnxruntime", "onnxruntime", 32, {"precision": "fp32"}),
    "openvino": Form(
        "OpenVINO GenAI, float32 (float32 keys)",
        "openvino",
        "openvino",
        32,
        {"weights": ["fp32"], "properties": _F32_KEYS},
    ),
    # With flash attention, float32 keys become float16: 1e-3 from the model.
    "llama.cpp": Form(
        "llama.cpp, float32 (float32 keys, no flash attention)",
        "llama.cpp",
        "llama_cpp",
        32,
        {"type": "F32", "keys": 0, "flash": False},
    ),
    "ours-bf16": Form(
        "**ours, bfloat16 weights, native operators**", "here", "ours", 16, {"export": {**_NATIVE, **_LONG}}
    ),
    "ours-bf16-runner": Form(
        "**ours, bfloat16 weights, native operators, without torch**", "here", "runner", 16, of="ours-bf16"
    ),
    "ours-bf16-products": Form(
        "**ours, bfloat16 products, native operators**",
        "here",
        "ours",
        16,
        {"export": {**_NATIVE, **_LONG, "compute": "bfloat16"}},
    ),
    "ours-bf16-products-runner": Form(
        "**ours, bfloat16 products, native operators, without torch**", "here", "runner", 16, of="ours-bf16-products"
    ),
    "onnxruntime-of-bf16": Form("ONNX Runtime GenAI, float32", "onnxruntime", "onnxruntime", 16, {"precision": "fp32"}),
    "openvino-fp16": Form(
        "OpenVINO GenAI, float16 weights (its defaults: 8-bit keys)",
        "openvino",
        "openvino",
        16,
        {"weights": ["fp16"], "properties": {}},
    ),
    "llama.cpp-bf16": Form(
        "llama.cpp, bfloat16 (its defaults: float16 keys)",
        "llama.cpp",
        "llama_cpp",
        16,
        {"type": "BF16", "keys": 1, "flash": True},
    ),
    "ours-8da4w": Form("**ours, 8da4w**", "here", "ours", 4, {"export": _SMALL}),
    "ours-8da4w-native": Form(
        "**ours, 8da4w, native operators**", "here", "ours", 4, {"export": {**_SMALL, **_NATIVE}}
    ),
    "ours-8da4w-int8": Form(
        "**ours, 8da4w, native operators, 8-bit keys**",
        "here",
        "ours",
        4,
        {"export": {**_SMALL, **_NATIVE, "kv_dtype": "int8"}},
    ),
    "ours-8da4w-int8-runner": Form(
        "**ours, 8da4w, native operators, 8-bit keys, without torch**", "here", "runner", 4, of="ours-8da4w-int8"
    ),
    "executorch-8da4w": Form(
        "ExecuTorch's own export, 8da4w",
        "here",
        "executorch",
        4,
        {"settings": ["quantization.qmode=8da4w", "quantization.group_size=32"]},
    ),
    "onnxruntime-int4": Form("ONNX Runtime GenAI, int4", "onnxruntime", "onnxruntime", 4, {"precision": "int4"}),
    "openvino-int4": Form(
        "OpenVINO GenAI, int4 (its defaults: 8-bit keys)",
        "openvino",
        "openvino",
        4,
        {"weights": ["int4", "--group-size", "32", "--sym", "--ratio", "1.0"], "properties": {}},
    ),
    "llama.cpp-q4_0": Form(
        "llama.cpp, Q4_0 (its defaults: float16 keys)",
        "llama.cpp",
        "llama_cpp",
        4,
        {"type": "Q4_0", "keys": 1, "flash": True},
    ),
}
