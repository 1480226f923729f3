"""What transformers' own static caches make of the zoo: the same models, tokens and tolerance, none of this package.

`static_cache`: the model in eager mode over `StaticCache`. `exporter`: `TorchExportableModuleForDecoderOnlyLM`, exported
by `torch.export`, fed token by token, as its own `generate` does. `dynamo`: the prefill and decode of `DynamoExporter` in
the loop of the model's own `generate`. `openvino_exporter`, `mlx_exporter`: its exporters for two devices.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from transformers import (
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

from exportable_cache.backends.executorch.delegates.mlx_evaluator import Graph, only_call
from exportable_cache.common.compat.executorch import deserialized_file, prepare_mlx_schema
from exportable_cache.errors import VerificationError

from .build import PROMPTS, STEPS, encoded, forced_logits
from .conditioning import TOLERANCE
from .shrink import WINDOW

MAX_CACHE_LEN = 64

References = dict[int, torch.Tensor]


def static_cache(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor], references: References
) -> tuple[float, str]:
    """Largest |logit difference| over all prompts, and a remark.

    Args:
        ids: int64 [1, length], or [1, length, codebooks].
        inputs: Of the encoder, where there is one.
        references: By prompt length: [STEPS + 1, vocab].
    """
    gaps = {}
    for pieces in PROMPTS:
        encoding = encoded(model, inputs)
        found = forced_logits(model, ids, pieces, _static_cache(model, encoding), encoding)
        gaps[" + ".join(map(str, pieces))] = _gap(found, references[sum(pieces)])
    return max(gaps.values()), "by prompt: " + ", ".join(f"{name}: {gap:.0e}" for name, gap in gaps.items())


def _static_cache(model: PreTrainedModel, encoding: dict) -> StaticCache | EncoderDecoderCache:
    """As `generate(cache_implementation="static")` makes it."""
    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=MAX_CACHE_LEN)
    if not encoding:
        return cache
    length = encoding["encoder_outputs"][0].shape[1]
    return EncoderDecoderCache(cache, StaticCache(config=config, max_cache_len=length))


@torch.no_grad()
def exporter(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor], references: References
) -> tuple[float, str]:
    """See `static_cache`; of a decoder."""
    copied = copy.deepcopy(model)
    copied.generation_config.update(cache_implementation="static", use_cache=True)
    made = TorchExportableModuleForDecoderOnlyLM(copied, batch_size=1, max_cache_len=MAX_CACHE_LEN)
    position = torch.zeros(1, dtype=torch.int64)
    program = made.export(input_ids=ids[:, :1], cache_position=position, strict=False).module()
    prompts = sorted(references)
    rows = [
        program(input_ids=ids[:, i : i + 1], cache_position=position + i)[0, -1] for i in range(prompts[-1] + STEPS)
    ]
    found = torch.stack(rows)
    gaps = {prompt: _gap(found[prompt - 1 : prompt + STEPS], references[prompt]) for prompt in prompts}
    within = _gap(found[prompts[0] - 1 : WINDOW], references[prompts[0]][: WINDOW - prompts[0] + 1])
    return max(gaps.values()), f"up to position {WINDOW}: {within:.0e}"


class _Forced(LogitsProcessor):
    """Chooses the tokens of a text whatever the logits are.

    Args:
        ids: int64 [1, length].
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        # Of the token after the last nothing is asked.
        forced[:, self.ids[0, input_ids.shape[1] % self.ids.shape[1]]] = 0
        return forced


def dynamo(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor], references: References
) -> tuple[float, str]:
    """See `static_cache`; of a decoder. Its `generate` runs with the exported prefill and decode in the place of its
    forward, after the longest prompt.
    """
    prompt = max(references)
    copied = copy.deepcopy(model)
    asked = GenerationConfig(
        cache_implementation="static", max_cache_len=MAX_CACHE_LEN, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    sample = {"input_ids": ids[:, :prompt], "attention_mask": torch.ones(1, prompt, dtype=torch.int64)}
    made = DynamoExporter().export_for_generation(copied, dict(sample), DynamoConfig(), generation_config=asked)
    asked.update(max_new_tokens=STEPS + 1, output_logits=True, return_dict_in_generate=True)
    original = copied.forward

    @functools.wraps(original)
    def forward(**kwargs: Any) -> Any:
        # Of a model that takes pictures or sound the prefill is cut into pieces; then only decode is the program's.
        runner = made.runners.get("decode" if kwargs["input_ids"].shape[1] == 1 else "prefill")
        if runner is None:
            return original(**kwargs)
        return runner(**{name: given for name, given in kwargs.items() if name in runner.metadata.kwargs})

    copied.forward = forward
    processors = LogitsProcessorList([_Forced(ids)])
    found = copied.generate(**sample, generation_config=asked, logits_processor=processors)
    return _gap(torch.stack([row[0] for row in found.logits]), references[prompt]), f"prompt of {prompt}"


class NotEvaluatedError(Exception):
    """A program that was lowered, but not to one call of its delegate, which is all that can be evaluated here."""


def load_exporters(column: str) -> None:
    """Import what a column of an exporter for devices needs, before processes are forked."""
    if column == "mlx_exporter":
        prepare_mlx_schema()
        import_module("executorch.backends.mlx")
    import_module(f"transformers.exporters.exporter_{'openvino' if column == 'openvino_exporter' else 'executorch'}")


@torch.no_grad()
def openvino_exporter(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor], references: References
) -> tuple[float, str]:
    """See `static_cache`; of a decoder: `OpenVINOExporter`, in OpenVINO on this processor.

    First with a decode of several tokens and its state inside, which also takes prompts. If that does not pass, with a
    prefill and a decode that take and return the cache, and then with a decode of one token and its state inside.
    """
    found: dict[str, float] = {}
    failed: Exception | None = None
    for remark, way in (
        ("prompts in one call", functools.partial(_openvino_inside, several=True)),
        ("prefill and decode", _openvino_passed),
        ("token by token", functools.partial(_openvino_inside, several=False)),
    ):
        try:
            found[remark] = way(model, ids, references)
        except Exception as error:  # any code of the exporter, of the model and of OpenVINO runs here
            failed = failed or error
            continue
        if found[remark] <= TOLERANCE:
            break
    if not found:
        assert failed is not None
        raise failed
    remark = min(found, key=found.__getitem__)
    return found[remark], remark


def _openvino_runner(part: PreTrainedModel, given: dict[str, Any], **options: Any) -> Any:
    from transformers.exporters.exporter_openvino import OpenVINOConfig, OpenVINOExporter

    exported = OpenVINOExporter().export(part, given, OpenVINOConfig(dynamic=True, **options))
    # The precision is asked for, because OpenVINO would choose bfloat16 where the processor has it.
    config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    return exported.to("cpu", config=config).runners["model"]


def _openvino_inside(model: PreTrainedModel, ids: torch.Tensor, references: References, several: bool) -> float:
    from transformers.exporters.utils import decompose_for_generation, openvino_feed

    sample, asked = _sample(ids, max(references))
    parts = decompose_for_generation(copy.deepcopy(model), sample, asked, multi_token_decode=several)
    runner = _openvino_runner(*parts["decode"])
    [logits] = [port for port in runner.compiled_model.outputs if "logits" in port.get_names()]

    def step(start: int, end: int) -> torch.Tensor:
        feed = openvino_feed(runner.compiled_model, _step(runner.metadata, ids, start, end))
        left = len(runner.compiled_model.inputs) - len(feed)
        if left:
            raise NotEvaluatedError(f"{left} inputs of the state are left to the caller")
        return torch.from_numpy(runner.request.infer(feed)[logits][0, -1].copy())

    gaps = []
    for pieces in PROMPTS:
        runner.request.reset_state()
        gaps.append(_gap(_fed(step, pieces if several else (1,) * sum(pieces)), references[sum(pieces)]))
    return max(gaps)


def _openvino_passed(model: PreTrainedModel, ids: torch.Tensor, references: References) -> float:
    runners, begun = _parts(model, ids, references, functools.partial(_openvino_runner, stateful=False))

    def call(name: str, given: dict[str, torch.Tensor], caches: dict[str, Any]) -> Any:
        return runners[name](**given, **caches)

    return _gap_of_parts(call, runners, begun, ids, references)


@torch.no_grad()
def mlx_exporter(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor], references: References
) -> tuple[float, str]:
    """See `static_cache`; of a decoder: the prefill and the decode of `ExecutorchExporter` for MLX, which take and
    return the cache. Their graphs are evaluated on the CPU as those of this package are.

    Raises:
        NotEvaluatedError: If a program is not one call of the delegate.
    """
    load_exporters("mlx_exporter")
    from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter
    from transformers.exporters.runners.runner_executorch import ExecutorchModelRunner

    def runner_of(part: PreTrainedModel, given: dict[str, Any]) -> ExecutorchModelRunner:
        exported = ExecutorchExporter().export(part, given, ExecutorchConfig(backend="mlx", dynamic=True))
        [component] = exported.components.values()
        return ExecutorchModelRunner(_Evaluated(component.program.buffer), component.metadata)

    runners, begun = _parts(model, ids, references, runner_of)

    def call(name: str, given: dict[str, torch.Tensor], caches: dict[str, Any]) -> Any:
        runner = runners[name]
        values = {**runner.metadata.in_constants, **given, **caches}
        # By position, because the exported form of a cache states how many tokens the sample had.
        leaves = [
            leaf
            for key in runner.in_spec.children_specs[1].context
            for leaf in torch.utils._pytree.tree_leaves(values[key])
        ]
        return runner.unflatten(runner.method.execute(leaves))

    return _gap_of_parts(call, runners, begun, ids, references), "prefill and decode"


def _parts(
    model: PreTrainedModel, ids: torch.Tensor, references: References, runner_of: Callable[..., Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runners of prefill and decode, and the caches, by name, that a prefill begins with."""
    from transformers.exporters.utils import decompose_for_generation

    sample, asked = _sample(ids, max(references))
    parts = decompose_for_generation(copy.deepcopy(model), sample, asked)
    begun = {key: value for key, value in parts["prefill"][1].items() if type(value).__name__.endswith("Cache")}
    return {name: runner_of(part, given) for name, (part, given) in parts.items()}, begun


def _gap_of_parts(
    call: Callable[[str, dict[str, torch.Tensor], dict[str, Any]], Any],
    runners: dict[str, Any],
    begun: dict[str, Any],
    ids: torch.Tensor,
    references: References,
) -> float:
    """Largest |logit difference| of prefill and decode. A second piece of a prompt is fed token by token."""
    caches: dict[str, Any] = {}

    def step(start: int, end: int) -> torch.Tensor:
        name = "prefill" if start == 0 else "decode"
        found = call(name, _step(runners[name].metadata, ids, start, end), caches if start else begun)
        caches.update({key: value for key, value in found.items() if key.startswith(("past_key", "cache_par"))})
        return found.logits[0, -1].clone()

    return max(
        _gap(_fed(step, (first, *[1] * sum(others))), references[first + sum(others)]) for first, *others in PROMPTS
    )


class _Evaluated:
    """A program of ExecuTorch with one method, which is one call of MLX's delegate.

    Args:
        data: The `.pte`.
    """

    def __init__(self, data: bytes) -> None:
        file = deserialized_file(data)
        [self.plan] = file.program.execution_plan
        try:
            self.inputs = only_call(self.plan)
        except VerificationError:
            others = ", ".join(sorted({one.name for one in self.plan.operators}))
            raise NotEvaluatedError(
                f"{len(self.plan.delegates)} calls of the delegate, and {others} between them"
            ) from None
        payload = file.program.backend_delegate_data[self.plan.delegates[0].processed.index].data
        named = file.named_data
        stored = {name: named.buffers[entry.buffer_index] for name, entry in named.pte_data.items()} if named else {}
        self.graph = Graph(payload, stored)

    def load_method(self, name: str) -> _Evaluated:
        """Return the method, as ExecuTorch's `Program` does."""
        return self

    def execute(self, leaves: list[Any]) -> list[Any]:
        """Return the outputs for the inputs, both as the program has them."""
        [instruction] = [one for chain in self.plan.chains for one in chain.instructions]
        places = [one for one in instruction.instr_args.args if one not in self.plan.inputs]
        found = dict(zip(places, self.graph.run([leaves[index] for index in self.inputs]), strict=True))
        given = dict(zip(self.plan.inputs, leaves, strict=True))
        return [{**given, **found}.get(one) for one in self.plan.outputs]


def _sample(ids: torch.Tensor, prompt: int) -> tuple[dict[str, torch.Tensor], GenerationConfig]:
    """Arguments of `generate`, for an exporter to see the calls of the model."""
    asked = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return {"input_ids": ids[:, :prompt], "attention_mask": torch.ones(1, prompt, dtype=torch.int64)}, asked


def _step(metadata: Any, ids: torch.Tensor, start: int, end: int) -> dict[str, torch.Tensor]:
    """Inputs for the tokens from `start` to `end`, in the forms that an exporter recorded."""
    positions = torch.arange(start, end)
    forms = {
        "input_ids": lambda shape: ids[:, start:end],
        "attention_mask": lambda shape: torch.ones(1, end, dtype=torch.int64),
        "position_ids": lambda shape: positions.expand(*shape[:-1], -1),
        "cache_position": lambda shape: positions,
    }
    given = {name: described["shape"] for name, described in metadata.kwargs.items() if "shape" in described}
    unknown = [name for name in given if name not in forms]
    if unknown or len(given.get("attention_mask", (1, 1))) != 2:
        raise NotEvaluatedError(f"inputs {', '.join(unknown) or 'attention_mask'} are left to the caller")
    return {name: forms[name](shape) for name, shape in given.items()}


def _fed(step: Callable[[int, int], torch.Tensor], pieces: Sequence[int]) -> torch.Tensor:
    """Logits [STEPS + 1, vocab] after a prompt in pieces, and after each of the tokens that follow."""
    start, rows = 0, []
    for count in (*pieces, *[1] * STEPS):
        rows.append(step(start, start + count))
        start += count
    return torch.stack(rows[len(pieces) - 1 :])


def _gap(found: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (found - reference).abs().max().item()
    return float("inf") if difference != difference else difference
