"""The runtimes of benchmarks/peers.py with one interface; benchmarks/peer_worker.py runs one in its environment.

OpenVINO GenAI's `LLMPipeline.generate` cannot be interleaved: it runs a prompt and its tokens in one call, and
continues in its own thread while a streamer waits. On this kind of processor `LLMPipeline` runs a
`ContinuousBatchingPipeline`, whose `step` makes one token. That is called here, with the settings of `LLMPipeline`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from peer_forms import CHECKED_PROMPT, Form


class Runtime:
    """An open form. A runtime that returns no logits overrides `logits`."""

    def reset(self) -> None:
        """Drop every token; not timed."""
        raise NotImplementedError

    def feed(self, ids: list[int]) -> None:
        """Feed a prompt, or continue one."""
        raise NotImplementedError

    def next(self) -> None:
        """Choose the most probable token, and feed it."""
        raise NotImplementedError

    def values(self) -> Any:
        """Return the logits after the last token, [vocabulary]."""
        raise NotImplementedError

    def prompt(self, ids: list[int]) -> float:
        """Return the seconds of a prompt on an empty cache."""
        self.reset()
        begin = time.perf_counter()
        self.feed(ids)
        return time.perf_counter() - begin

    def steps(self, count: int) -> list[float]:
        """Return the seconds of each of `count` more tokens."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            self.next()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def logits(self, ids: list[int]) -> Any:
        """Return the logits of a prompt's last token and of the given tokens after it, [tokens, vocabulary]."""
        import numpy

        self.reset()
        self.feed(ids[:CHECKED_PROMPT])
        rows = [numpy.array(self.values(), dtype=numpy.float32).reshape(-1)]
        for token in ids[CHECKED_PROMPT:]:
            self.feed([token])
            rows.append(numpy.array(self.values(), dtype=numpy.float32).reshape(-1))
        return numpy.stack(rows)


class Ours(Runtime):
    """A bundle through the native runner, without torch, as the command line runs it."""

    def __init__(self, form: Form, folder: Path, plan: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(__file__).parent.parent))
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


class Reading(Runtime):
    """Reading as many bytes as a token's weights have: the time below which no form of that precision comes."""

    def __init__(self, form: Form, folder: Path, plan: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(plan["threads"])
        self._values = torch.ones(int((folder / "bytes.txt").read_text()) // 4)

    def reset(self) -> None:
        pass

    def feed(self, ids: list[int]) -> None:
        pass

    def next(self) -> None:
        self._values.sum()


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
        # No end before the last slot, because any tokens are measured.
        parameters.set_search_options(max_length=self._slots, min_length=self._slots, do_sample=False)
        self._generator = self._library.Generator(self._model, parameters)

    def feed(self, ids: list[int]) -> None:
        self._generator.append_tokens(ids)

    def prompt(self, ids: list[int]) -> float:
        self.reset()
        begin = time.perf_counter()
        self.feed(ids)
        # The first token is only chosen, because its logits are the prompt's.
        self.next()
        return time.perf_counter() - begin

    def next(self) -> None:
        self._generator.generate_next_token()

    def values(self) -> Any:
        return self._generator.get_logits()


class OpenVino(Runtime):
    """OpenVINO GenAI's pipeline. It returns no logits, so OpenVINO computes those of the same file."""

    def __init__(self, form: Form, folder: Path, plan: dict[str, Any]) -> None:
        self._path = folder / "openvino"
        self._properties = {"INFERENCE_NUM_THREADS": plan["threads"], **form.options["properties"]}
        if "logits" in plan:
            return
        import numpy
        import openvino
        import openvino_genai

        self._library, self._numpy, self._tensor = openvino_genai, numpy, openvino.Tensor
        scheduler = openvino_genai.SchedulerConfig()
        # The settings of LLMPipeline: a prompt is one step, and its prefix is cached.
        scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2**62, True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(self._path), scheduler, "CPU", self._properties)
        self._slots, self._request, self._requests = plan["slots"], None, 0

    def reset(self) -> None:
        if self._request is not None:
            self._request.cancel()
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
        self._request = None

    def feed(self, ids: list[int]) -> None:
        tokens = self._tensor(self._numpy.array([ids], dtype=self._numpy.int64))
        limit = self._slots - len(ids)
        config = self._library.GenerationConfig(max_new_tokens=limit, ignore_eos=True, do_sample=False)
        self._requests += 1
        self._request = self._pipeline.add_request(self._requests, tokens, config)
        self._pipeline.step()

    def next(self) -> None:
        self._pipeline.step()

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
    "reading": Reading,
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
    "llama_cpp": LlamaCpp,
}
