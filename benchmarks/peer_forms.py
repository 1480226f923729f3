"""What benchmarks/peers.py compares: forms of one model, the environment that each runs in, and how it is made and run.

Only names and settings stand here, for the script of every environment reads them: benchmarks/peer_convert.py makes a
form's files, benchmarks/peer_runtimes.py runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: The token ids that every form is fed: spread over the vocabulary, the same everywhere.
VOCABULARY = 32000
#: Of the check for equal logits: a prompt, then single tokens.
CHECKED_PROMPT, CHECKED_STEPS = 40, 16
#: Tokens of a turn that are not timed, for others had the caches and the cores before.
UNTIMED = 2
#: Longest chunk of a prompt in ours and in ExecuTorch's own export; the others choose for themselves.
CHUNK = 256
#: Longest chunk in float32 with native operators, because a chunk reads the weights once. Peers need less memory.
LONG_CHUNK = 1024


def token_ids(count: int, first: int = 0) -> list[int]:
    """So many of them, from one of them on. A runtime may remember a prompt that begins as an earlier one did."""
    return [(7919 * index + 13) % (VOCABULARY - 16) + 8 for index in range(first, first + count)]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that the script makes, or with no packages the one that it runs in.

    Attributes:
        first: What pip installs by itself first, so that a build of torch that is configured locally is taken.
        packages: What it installs then.
        without: What these bring along and nothing here needs, but that fails to load beside another build of torch.
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
    # It is compiled for the processor at hand; this one runs where AVX-512 is hidden.
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
        title: Of its row.
        environment: One of `ENVIRONMENTS`.
        runtime: The function of benchmarks/peer_convert.py that makes it, the class of peer_runtimes.py that runs it.
        bits: Of its weights: 32, 16 of a checkpoint in bfloat16, or 4.
        options: What both get.
        of: The form whose files it runs, where it has none of its own.
    """

    title: str
    environment: str
    runtime: str
    bits: int
    options: dict[str, Any] = field(default_factory=dict)
    of: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the form is what the others are compared with."""
        return self.runtime in ("ours", "runner")

    def checkpoint(self, slots: int) -> str:
        """The folder of the model that it is made from."""
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
    # Its flash attention makes float32 keys float16: 1e-3 from the model.
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
