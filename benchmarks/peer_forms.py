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
#: The small model that all forms run: a random Llama of 110M parameters. The others are published shapes.
SMALL_MODEL = "llama-110m"
#: Published shapes of which 16-bit weights do not fit into memory twice; only 4-bit forms run them.
LARGE_MODELS = ("qwen3-4b", "qwen3-moe", "llama-3.1-8b")


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
#: Its image models take a third of the compilation, and nothing here runs them.
_WITHOUT_IMAGES = "-DLLAVA_BUILD=OFF"
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
    "llama.cpp": Environment((), _LLAMA_CPP, releases=("llama-cpp-python",), settings={"CMAKE_ARGS": _WITHOUT_IMAGES}),
    # Compiled for the processor at hand; this one runs with AVX-512 hidden.
    "llama.cpp-avx2": Environment(
        (),
        _LLAMA_CPP,
        releases=("llama-cpp-python",),
        settings={
            "CMAKE_ARGS": f"{_WITHOUT_IMAGES} -DGGML_NATIVE=OFF " + " ".join(f"-DGGML_{part}=ON" for part in _AVX2)
        },
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
        goals: How many times as good as the best peer the form should be, by kind of column: `prompt`, `first` and
            `last` (tokens at the first and last position), `peak_mb`.
    """

    title: str
    environment: str
    runtime: str
    bits: int
    options: dict[str, Any] = field(default_factory=dict)
    goals: dict[str, float] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """True if the form is ours, which the others are compared with."""
        return self.runtime == "ours"

    @property
    def is_bound(self) -> bool:
        """True if the form only reads as many bytes as a token's weights have, which bounds the speed of the others."""
        return self.runtime == "reading"

    def checkpoint(self, model: str, slots: int) -> str:
        """Return the folder of the checkpoint that the form is made from, within the model's folder."""
        if model != SMALL_MODEL:
            return "checkpoint"
        return f"checkpoint-16-{slots}" if self.bits == 16 else f"checkpoint-{slots}"


def forms_of(model: str) -> list[str]:
    """Return the forms that run a model by default."""
    if model == SMALL_MODEL:
        return list(FORMS)
    bits = (4,) if model in LARGE_MODELS else (16, 4)
    return [name for name, form in FORMS.items() if form.bits in bits and form.options.get("precision") != "fp32"]


_GOALS_16 = {"prompt": 1.0, "first": 1.0, "last": 1.2, "peak_mb": 1.0}
#: At most 0.8 times the best peer's memory.
_GOALS_4 = {"prompt": 1.3, "first": 1.15, "last": 1.5, "peak_mb": 1.25}
_F32_KEYS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
#: Options of exports of ours are those of `exportable_cache.export`.
FORMS = {
    "ours": Form("**ours, float32**", "here", "ours", 32, {"recipe": "exact"}),
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
    "reading": Form("reading the weights alone", "here", "reading", 32),
    "ours-bf16": Form("**ours, `exact`** (bfloat16 weights)", "here", "ours", 16, {"recipe": "exact"}, _GOALS_16),
    # It computes as the peers do.
    "ours-bf16-products": Form(
        "**ours, `half`** (bfloat16 weights and products, float16 keys)",
        "here",
        "ours",
        16,
        {"recipe": "half"},
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
    "reading-bf16": Form("reading the weights alone", "here", "reading", 16),
    "ours-fast": Form("**ours, `fast`** (8da4w, 8-bit keys)", "here", "ours", 4, {"recipe": "fast"}, _GOALS_4),
    "ours-portable": Form(
        "**ours, `portable`, 8da4w**", "here", "ours", 4, {"recipe": "portable", "quantize": "8da4w"}
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
    "reading-int4": Form("reading the weights alone", "here", "reading", 4),
}
