"""Runs one form of benchmarks/peers.py in its environment, in a process of its own.

    python benchmarks/peer_worker.py FORM FOLDER PLAN    # what the benchmark runs

PLAN is JSON: `{"threads": 2, "slots": 4096, "prompts": [128], "ends": [100], "steps": 8}` to measure, or
with `"logits"`, the file to write, in place of the last three.

It prints what it measured: seconds from its start to the first token of a prompt, of each prompt and of the tokens that
follow it, and the most memory that it had resident.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from peer_forms import CHECKED_PROMPT, CHECKED_STEPS, CHUNK, FORMS, Form, token_ids


def limit_threads(count: int) -> None:
    """Give ExecuTorch's pool a size; its Python runtime has no setting for that, but exports what C++ calls."""
    # Found, not imported: that would bring torch.
    library = ctypes.CDLL(importlib.util.find_spec("executorch.extension.pybindings._portable_lib").origin)
    name = "_ZN10executorch9extension10threadpool"
    pool_of, reset = library[f"{name}14get_threadpoolEv"], library[f"{name}10ThreadPool24_unsafe_reset_threadpoolEj"]
    pool_of.restype, reset.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_uint32)
    reset(pool_of(), count)


class Runtime:
    """A form, open. One that gives no logits one by one overrides `timed` and `logits`."""

    def reset(self) -> None:
        """Forget every token; not timed."""
        raise NotImplementedError

    def feed(self, ids: list[int]) -> None:
        """Go on with a prompt."""
        raise NotImplementedError

    def next(self) -> None:
        """Choose the likeliest token, and feed it."""
        raise NotImplementedError

    def values(self) -> Any:
        """Logits after the last token, [vocabulary]."""
        raise NotImplementedError

    def timed(self, ids: list[int], steps: int) -> tuple[float, list[float]]:
        """Seconds of a prompt, and of each of the tokens after it."""
        self.reset()
        begin = time.perf_counter()
        self.feed(ids)
        prompt, seconds = time.perf_counter() - begin, []
        for _ in range(steps):
            begin = time.perf_counter()
            self.next()
            seconds.append(time.perf_counter() - begin)
        return prompt, seconds

    def logits(self, ids: list[int]) -> Any:
        """Of a prompt's last token and of the tokens after it, whatever the likeliest would be."""
        import numpy

        self.reset()
        self.feed(ids[:CHECKED_PROMPT])
        rows = [numpy.array(self.values(), dtype=numpy.float32).reshape(-1)]
        for token in ids[CHECKED_PROMPT:]:
            self.feed([token])
            rows.append(numpy.array(self.values(), dtype=numpy.float32).reshape(-1))
        return numpy.stack(rows)


class Ours(Runtime):
    """A bundle through its session."""

    def __init__(self, form: Form, folder: Path, plan: dict[str, Any]) -> None:
        import torch

        from exportable_cache import load

        limit_threads(plan["threads"])
        torch.set_grad_enabled(False)
        self._torch, self._session = torch, load(folder / "bundle")

    def reset(self) -> None:
        self._session.reset()

    def feed(self, ids: list[int]) -> None:
        self._logits = self._session.prefill(self._torch.tensor([ids]))

    def next(self) -> None:
        self._logits = self._session.decode(self._logits.argmax(-1))

    def values(self) -> Any:
        return self._logits


class Runner(Runtime):
    """A bundle through the C++ runner, in a Python without torch."""

    def __init__(self, form: Form, folder: Path, plan: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(__file__).parent.parent / "runners" / "python"))
        from exportable_cache_runner import Session

        self._session = Session(folder / "bundle", threads=plan["threads"])

    def reset(self) -> None:
        self._session.reset()

    def feed(self, ids: list[int]) -> None:
        self._logits = self._session.prefill(ids)

    def next(self) -> None:
        import numpy

        self.feed([int(numpy.frombuffer(self._logits, dtype=numpy.float32).argmax())])

    def values(self) -> Any:
        return self._logits


class ExecuTorch(Runtime):
    """A `.pte` with `forward(tokens, position)`, as its own runner calls it."""

    def __init__(self, form: Form, folder: Path, plan: dict[str, Any]) -> None:
        import torch
        from executorch_worker import load_method

        limit_threads(plan["threads"])
        self._torch, self._method = torch, load_method(folder / "program.pte")
        self._position = 0

    def reset(self) -> None:
        self._position = 0

    def feed(self, ids: list[int]) -> None:
        for start in range(0, len(ids), CHUNK):
            self._run(ids[start : start + CHUNK])

    def _run(self, ids: list[int]) -> None:
        torch = self._torch
        self._logits = self._method.execute([torch.tensor([ids]), torch.tensor([self._position])])[0]
        self._position += len(ids)

    def next(self) -> None:
        self._run([int(self._logits.argmax())])

    def values(self) -> Any:
        return self._logits


class OnnxRuntime(Runtime):
    """ONNX Runtime GenAI's generator."""

    def __init__(self, form: Form, folder: Path, plan: dict[str, Any]) -> None:
        import onnxruntime_genai

        self._library, self._slots = onnxruntime_genai, plan["slots"]
        config = onnxruntime_genai.Config(str(folder / "onnx"))
        options = {"intra_op_num_threads": plan["threads"]}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)
        self._generator = None

    def reset(self) -> None:
        self._generator = None
        parameters = self._library.GeneratorParams(self._model)
        # No end before the last slot: what is measured are tokens, whichever they are.
        parameters.set_search_options(max_length=self._slots, min_length=self._slots, do_sample=False)
        self._generator = self._library.Generator(self._model, parameters)

    def feed(self, ids: list[int]) -> None:
        self._generator.append_tokens(ids)

    def timed(self, ids: list[int], steps: int) -> tuple[float, list[float]]:
        self.reset()
        begin = time.perf_counter()
        self.feed(ids)
        # The first token is only chosen: its logits are the prompt's.
        self.next()
        prompt, seconds = time.perf_counter() - begin, []
        for _ in range(steps):
            begin = time.perf_counter()
            self.next()
            seconds.append(time.perf_counter() - begin)
        return prompt, seconds

    def next(self) -> None:
        self._generator.generate_next_token()

    def values(self) -> Any:
        return self._generator.get_logits()


class OpenVino(Runtime):
    """OpenVINO GenAI's pipeline. It gives no logits: those are of the same file, run by OpenVINO."""

    def __init__(self, form: Form, folder: Path, plan: dict[str, Any]) -> None:
        self._path = folder / "openvino"
        self._properties = {"INFERENCE_NUM_THREADS": plan["threads"], **form.options["properties"]}
        if "logits" in plan:
            return
        import numpy
        import openvino
        import openvino_genai

        self._library, self._numpy, self._tensor = openvino_genai, numpy, openvino.Tensor
        self._pipeline = openvino_genai.LLMPipeline(str(self._path), "CPU", **self._properties)

    def timed(self, ids: list[int], steps: int) -> tuple[float, list[float]]:
        tokens = self._numpy.array([ids], dtype=self._numpy.int64)
        inputs = self._library.TokenizedInputs(self._tensor(tokens), self._tensor(self._numpy.ones_like(tokens)))
        config = self._library.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True, do_sample=False)
        result = self._pipeline.generate(inputs, config)
        raw = result.perf_metrics.raw_metrics
        first = raw.m_times_to_first_token[0] / 1e6
        return first, [value / 1e6 for value in raw.m_durations[-steps:]] if steps else []

    def logits(self, ids: list[int]) -> Any:
        import numpy
        import openvino

        model = openvino.Core().compile_model(str(self._path / "openvino_model.xml"), "CPU", self._properties)
        request, rows = model.create_infer_request(), []
        names = {name for port in model.inputs for name in port.names}
        starts = [(0, CHECKED_PROMPT), *((start, start + 1) for start in range(CHECKED_PROMPT, len(ids)))]
        for start, end in starts:
            inputs = {"input_ids": numpy.array([ids[start:end]]), "attention_mask": numpy.ones((1, end), numpy.int64)}
            inputs |= {"position_ids": numpy.arange(start, end)[None], "beam_idx": numpy.zeros(1, numpy.int32)}
            found = request.infer({name: value for name, value in inputs.items() if name in names})
            rows.append(numpy.array(found[model.outputs[0]][0, -1]))
        return numpy.stack(rows)


class LlamaCpp(Runtime):
    """llama.cpp through llama-cpp-python."""

    def __init__(self, form: Form, folder: Path, plan: dict[str, Any]) -> None:
        import llama_cpp

        threads, keys = plan["threads"], form.options["keys"]
        self._llama = llama_cpp.Llama(
            str(folder / "model.gguf"),
            n_ctx=plan["slots"],
            n_threads=threads,
            n_threads_batch=threads,
            type_k=keys,
            type_v=keys,
            flash_attn=form.options["flash"],
            verbose=False,
        )
        self._library = llama_cpp
        self._size = self._llama.n_vocab()

    def reset(self) -> None:
        self._llama.reset()

    def feed(self, ids: list[int]) -> None:
        self._llama.eval(ids)

    def next(self) -> None:
        self._llama.eval([int(self.values().argmax())])

    def values(self) -> Any:
        import numpy

        pointer = self._library.llama_get_logits_ith(self._llama.ctx, -1)
        return numpy.ctypeslib.as_array(pointer, shape=(self._size,))


RUNTIMES = {
    "ours": Ours,
    "runner": Runner,
    "executorch": ExecuTorch,
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
    "llama_cpp": LlamaCpp,
}


def peak_mb() -> float:
    """Most resident memory of this process: Linux's own counter, for `getrusage` counts what the parent had, too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("this system does not count the most resident memory")


def seconds_since_start() -> float:
    """How long this process has been there, whatever started it; Linux counts in hundredths."""
    begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begin


def main() -> None:
    """Open the form, and answer."""
    # Answers go where nothing else is printed.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    form, folder, plan = FORMS[sys.argv[1]], Path(sys.argv[2]), json.loads(sys.argv[3])
    runtime = RUNTIMES[form.runtime](form, folder, plan)
    if "logits" in plan:
        import numpy

        numpy.save(plan["logits"], runtime.logits(token_ids(CHECKED_PROMPT + CHECKED_STEPS)))
        print("{}", file=answers, flush=True)
        return
    runtime.timed(token_ids(8), 1)
    found: dict[str, Any] = {"start_s": seconds_since_start(), "prompt": {}, "token": {}}
    for count in plan["prompts"]:
        found["prompt"][count] = runtime.timed(token_ids(count, count), 1)[0]
    for position in plan["ends"]:
        prompt, seconds = runtime.timed(token_ids(position, position), plan["steps"] + 1)
        found["prompt"].setdefault(position, prompt)
        # What the first step sets up is not what a token costs.
        found["token"][position] = seconds[1:]
    processor = os.times()
    found |= {"processor_s": processor.user + processor.system, "peak_mb": peak_mb()}
    print(json.dumps(found), file=answers, flush=True)
    # Some runtimes take seconds to close.
    os._exit(0)


if __name__ == "__main__":
    main()
