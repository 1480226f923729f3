"""Compare the compiled decoding loop with its alternatives and with the memory bound, in one run on one machine.

    python benchmarks/loop.py --quick                                  # 110M Llama, batch 1
    python benchmarks/loop.py --plot loop.svg --json loop.json         # everything; most of an hour on 2 cores
    python benchmarks/loop.py --model llama-1b --batch 1 --length 32768      # for a GPU, as llama-8b is
    python benchmarks/loop.py --model llama-1b --batch 1 --answers 128       # whole responses next to `generate`

Forms: transformers' step with `DynamicCache` in eager mode, which is what `generate` runs; its `StaticCache` compiled;
a loop in the style of gpt-fast (Llamas only); ours, compiled, read by length buckets. On a GPU, which is used if there
is one, compiled forms replay CUDA graphs. The bound is the time to read every weight and the filled cache once, by two
measures of bandwidth: that of a large copy, which reads and writes, and that of a large sum, which only reads, as a
step does.

Rounds are interleaved, copies and sums among them, so that a slow moment of the machine affects all. Positions are set,
not generated, because the time of a step depends on the position and not on the cache's contents. Every form is checked
first, on a short sequence: the root mean square of its logits' differences from the model's, as a share of the spread
(standard deviation) of these. Largest differences say little in 16 bits: 9.4e-2 between transformers' own forms of a 1B
model in bfloat16 on an H200.
"""

from __future__ import annotations

import copy
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gpt_fast_loop import GptFastLlama
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    StaticCache,
)

from exportable_cache import ExportableCache, Session
from exportable_cache.common.devices import weights_bytes
from exportable_cache.program.methods import method_for

Step = Callable[[int], torch.Tensor]
DYNAMIC, STATIC, GPT_FAST, OURS = (
    "transformers dynamic",
    "transformers static, compiled",
    "gpt-fast style",
    "ours, compiled",
)

SHORT = {"dynamic": DYNAMIC, "static": STATIC, "gpt-fast": GPT_FAST, "ours": OURS}

MODELS = {
    "llama-tiny": lambda n: LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
        max_position_embeddings=n,
    ),
    "llama-110m": lambda n: LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        vocab_size=32000, max_position_embeddings=n,
    ),
    "llama-500m": lambda n: LlamaConfig(
        hidden_size=1536, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32000, max_position_embeddings=n,
    ),
    "llama-1b": lambda n: LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        vocab_size=128256, max_position_embeddings=n, tie_word_embeddings=True,
    ),
    "llama-8b": lambda n: LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=128256, max_position_embeddings=n,
    ),
    "gemma3-hybrid": lambda n: Gemma3TextConfig(
        hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        vocab_size=32000, max_position_embeddings=n, sliding_window=512,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
    ),
    "qwen3-36": lambda n: Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, max_position_embeddings=n, tie_word_embeddings=True,
    ),
    "qwen3-moe-tiny": lambda n: Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, vocab_size=256, max_position_embeddings=n,
    ),
    "qwen3-moe-400m": lambda n: Qwen3MoeConfig(
        hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_experts=32,
        num_experts_per_tok=4, moe_intermediate_size=512, vocab_size=32000, max_position_embeddings=n,
    ),
}  # fmt: skip
#: The tiny models are for dry runs, the deep one for `cold.py`, and those of 1B, 8B and experts are for a GPU.
MEASURED = ("llama-110m", "llama-500m", "gemma3-hybrid")
#: Largest root mean square of the logits' differences, as a share of their spread.
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass
class Row:
    """A measurement: median milliseconds, and the memory bounds by copies and by reads."""

    model: str
    batch: int
    position: int
    form: str
    ms: float
    bound_ms: float
    read_bound_ms: float


def random_model(name: str, length: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a random model of `MODELS`."""
    torch.manual_seed(0)
    # Made on the device, where billions of random numbers take a moment, and not converted, because frequencies of
    # rotary embeddings stay in float32.
    with torch.device(device):
        return AutoModelForCausalLM.from_config(MODELS[name](length), dtype=dtype).eval()


def share_of_spread(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the logits' differences as a share of the expected logits' spread."""
    difference = (found.float() - expected.float()).square().mean().sqrt()
    return (difference / expected.float().std()).item()


def compiled(module: torch.nn.Module) -> Callable[..., Any]:
    """Compile a step as the peers do, with CUDA graphs on a GPU."""
    on_gpu = next(module.parameters()).is_cuda
    graph = torch.compile(module, fullgraph=True, dynamic=False, mode="reduce-overhead" if on_gpu else None)

    def step(*args: Any, **kwargs: Any) -> Any:
        # The previous step's output is not needed any more.
        torch.compiler.cudagraph_mark_step_begin()
        return graph(*args, **kwargs)

    return step if on_gpu else graph


def dynamic_step(model: PreTrainedModel, tokens: torch.Tensor) -> Step:
    """Step transformers eagerly with `DynamicCache`."""
    filled: dict[int, DynamicCache] = {}

    def step(position: int) -> torch.Tensor:
        if position not in filled:
            filled.clear()
            filled[position] = cache = DynamicCache(config=model.config)
            for index in range(model.config.num_hidden_layers):
                shape = (tokens.shape[0], model.config.num_key_value_heads, position, model.config.head_dim)
                zeros = torch.zeros(shape, dtype=model.dtype, device=model.device)
                cache.update(zeros, zeros.clone(), index)
        cache = filled[position]
        kept = [(layer.keys, layer.values) for layer in cache.layers]
        logits = model(tokens, past_key_values=cache, position_ids=torch.full_like(tokens, position)).logits[:, -1]
        for layer, (keys, values) in zip(cache.layers, kept, strict=True):
            layer.keys, layer.values = keys, values
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = position
        return logits

    return step


def static_step(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> Step:
    """Step transformers with a compiled `StaticCache`."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    config = model.config
    cache.early_initialization(tokens.shape[0], config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    call = compiled(model)

    def step(position: int) -> torch.Tensor:
        for layer in cache.layers:
            if isinstance(layer.cumulative_length, torch.Tensor):
                layer.cumulative_length.fill_(position)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = position
        return call(
            tokens, past_key_values=cache, position_ids=torch.full_like(tokens, position), logits_to_keep=1
        ).logits[:, -1]

    return step


def gpt_fast_step(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> Step:
    """Step a compiled loop in the style of gpt-fast."""
    call = compiled(GptFastLlama(model, tokens.shape[0], length).eval())
    return lambda position: call(tokens, torch.tensor([position], device=model.device))


def our_step(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> Step:
    """Step our compiled session."""
    session = Session.from_model(model, ExportableCache.from_model(model, length, tokens.shape[0]), compile="wait")
    runner = session.runner

    def step(position: int) -> torch.Tensor:
        return runner.run(method_for(runner.methods, 1, position + 1), tokens, torch.full_like(tokens[:, 0], position))

    return step


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds that a call takes, including the GPU's work."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def copying(device: str, numbers: int = 2**27) -> Callable[[], float]:
    """Copy 512 MB and return the bandwidth in bytes per second, read and written."""
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    return lambda: 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def reading(device: str, numbers: int = 2**27) -> Callable[[], float]:
    """Sum 512 MB and return the bandwidth in bytes per second."""
    source = torch.ones(numbers, device=device)
    return lambda: source.nbytes / seconds(source.sum, device)


def copy_bandwidth(device: str = "cpu") -> float:
    """Return the copy bandwidth in bytes per second, the best of ten."""
    copy = copying(device)
    return max(copy() for _ in range(10))


def bytes_read(model: PreTrainedModel, batch: int, position: int) -> int:
    """Return the bytes that a step reads: weights, and the filled part of every layer's keys and values."""
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    weights = sum(parameter.nbytes for parameter in model.parameters()) - (0 if tied else embedding.nbytes)
    config = model.config
    windows = [
        config.sliding_window if kind == "sliding_attention" else position + 1
        for kind in getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    ]
    slots = sum(min(window, position + 1) for window in windows)
    return weights + 2 * model.dtype.itemsize * batch * slots * config.num_key_value_heads * config.head_dim


@torch.no_grad()
def main(
    models: Annotated[
        list[str] | None, typer.Option("--model", help=f"Of {', '.join(MODELS)}; those but the deep one by default.")
    ] = None,
    batches: Annotated[list[int] | None, typer.Option("--batch", help="Rows; 1 and 8 by default.")] = None,
    length: Annotated[int, typer.Option(help="Slots allocated.")] = 4096,
    positions: Annotated[list[int] | None, typer.Option("--position", help="100, 1000 and 4000 by default.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 6,
    steps: Annotated[int, typer.Option(help="Steps of each form per round.")] = 4,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda by default where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="By default float32 on a CPU, bfloat16 on a GPU.")] = None,
    forms: Annotated[list[str] | None, typer.Option("--form", help=f"Of {', '.join(SHORT)}; all by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The 110M Llama at batch 1 only.")] = False,
    answers: Annotated[int, typer.Option(help="Also time whole responses of N tokens, at batch 1.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw them here; needs matplotlib.")] = None,
) -> None:
    """Print milliseconds per step and the ratios that matter."""
    console = Console(width=150)
    names = ["llama-110m"] if quick else models or MEASURED
    batches = [1] if quick else batches or [1, 8]
    positions = positions or [100, 1000, 4000]
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    bandwidth = copy_bandwidth(device)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    console.print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s, {where}, cache {length}, {dtype}")
    rows: list[Row] = []
    whole: list[Answer] = []
    wrong: list[str] = []
    for name in names:
        for batch in batches:
            model = random_model(name, length, device, getattr(torch, dtype))
            chosen = [SHORT[form] for form in forms or SHORT]
            rows += measure(name, model, batch, positions, rounds, steps, console, chosen, wrong)
            console.print(table_of([row for row in rows if (row.model, row.batch) == (name, batch)]))
        if answers:
            whole += time_answers(
                name, lambda name=name: random_model(name, length, device, getattr(torch, dtype)), answers
            )
            console.print(answers_table([answer for answer in whole if answer.model == name]))
    if json_path is not None:
        record = {"rows": [asdict(row) for row in rows], "answers": [asdict(answer) for answer in whole]}
        json_path.write_text(json.dumps({"bandwidth": bandwidth, **record}, indent=1))
    if plot is not None:
        draw(rows, plot)
    if wrong:
        raise SystemExit("\n".join(wrong))


def measure(
    name: str,
    model: PreTrainedModel,
    batch: int,
    positions: list[int],
    rounds: int,
    steps: int,
    console: Console,
    chosen: Sequence[str],
    wrong: list[str],
) -> list[Row]:
    """Time forms of one model at one batch size. Forms with wrong logits are left out, and added to `wrong`."""
    torch._dynamo.reset()
    device, length = model.device, model.config.max_position_embeddings
    tokens = torch.randint(0, model.config.vocab_size, (batch, 1), device=device)
    allowed = ALLOWED[model.dtype]

    def again():
        return _copy(model)

    made: dict[str, Callable[[], Step]] = {
        DYNAMIC: lambda: dynamic_step(model, tokens),
        STATIC: lambda: static_step(again(), tokens, length),
        GPT_FAST: lambda: gpt_fast_step(model, tokens, length),
        OURS: lambda: our_step(again(), tokens, length),
    }
    if not name.startswith("llama"):
        del made[GPT_FAST]
    forms = {form: make() for form, make in made.items() if form in chosen}
    rows, copy, read = [], copying(device.type), reading(device.type)
    with console.status("") as status:
        expected = model(tokens.expand(-1, 6)).logits
        for form, step in list(forms.items()):
            if form != DYNAMIC:
                status.update(f"{name}, batch {batch}: checking {form}")
                found = torch.stack([step(position).clone() for position in range(6)], dim=1)
                share = share_of_spread(found, expected)
                if not share <= allowed:
                    wrong.append(f"{form} is wrong on {name}: its logits are off by {share:.1e} of their spread")
                    console.print(wrong[-1])
                    del forms[form]
        for position in positions:
            for form, step in list(forms.items()):
                status.update(f"{name}, batch {batch}, position {position}: preparing {form}")
                try:
                    # A CUDA graph is captured the second time.
                    for _ in range(3 if device.type == "cuda" else 1):
                        step(position)
                except Exception as error:  # transformers' own compiled sliding layers stop at the recompile limit
                    console.print(
                        f"{form} fails at position {position}: {type(error).__name__}: "
                        f"{str(error).splitlines()[0][:120]}"
                    )
                    del forms[form]
            times: dict[str, list[float]] = {form: [] for form in forms}
            copies, reads = [], []
            for done in range(rounds):
                copies += [copy() for _ in range(steps)]
                reads += [read() for _ in range(steps)]
                for form, step in forms.items():
                    status.update(f"{name}, batch {batch}, position {position}: round {done + 1} of {rounds}, {form}")
                    for _ in range(steps):
                        times[form].append(1e3 * seconds(functools.partial(step, position), device.type))
            copied, summed = statistics.median(copies), statistics.median(reads)
            reached = f"copies reach {copied / 1e9:.1f} GB/s, reads {summed / 1e9:.1f}"
            console.print(f"{name}, batch {batch}, position {position}: {reached}")
            size = 1e3 * bytes_read(model, batch, position)
            rows += [
                Row(name, batch, position, form, statistics.median(ms), size / copied, size / summed)
                for form, ms in times.items()
            ]
    return rows


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with a config of its own over the same weights, because a form sets its attention there."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


@dataclass
class Answer:
    """Times of whole responses of one form: the first one, with compilation, and the best of those that follow.

    Attributes:
        model: Name of the model.
        form: What generates.
        cold_first_seconds: Seconds to the first token of the first response; None where it is not known.
        cold_seconds: Seconds of the first response.
        first_ms: Milliseconds to the first token of a later response.
        tokens_per_second: Speed after it.
        peak_bytes: Peak memory that torch allocated on a GPU; None on a CPU.
        needed_bytes: Bytes of our weights and cache; None for other forms.
    """

    model: str
    form: str
    cold_first_seconds: float | None
    cold_seconds: float
    first_ms: float
    tokens_per_second: float
    peak_bytes: int | None
    needed_bytes: int | None


#: Forms of whole responses: keywords of `Session.from_model`, or of transformers' `generate`; the slow and least one last.
OUR_ANSWERS: dict[str, dict[str, Any]] = {"ours, eager": {}, "ours, compiled": {"compile": True}}
THEIR_ANSWERS: dict[str, dict[str, Any]] = {
    "transformers dynamic": {},
    "transformers static": {"cache_implementation": "static"},
}
SAMPLED_ANSWERS: dict[str, dict[str, Any]] = {"ours, compiled, sampled": {"compile": True}}
ANSWERS = (*OUR_ANSWERS, *THEIR_ANSWERS, *SAMPLED_ANSWERS)
_SAMPLING = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
#: Most seconds to wait for graphs that are compiled during the first response.
_MOST_WAIT = 120


def time_answers(
    name: str, make: Callable[[], PreTrainedModel], count: int, prompt_length: int = 100, runs: int = 3
) -> Iterator[Answer]:
    """Yield the times of whole responses, each form with a model of its own.

    Args:
        name: Name of the model.
        make: Returns the model.
        count: Tokens of a response.
        prompt_length: Tokens of the prompt.
        runs: Responses after the first one.
    """
    for form in ANSWERS:
        torch._dynamo.reset()
        model = make()
        model.generation_config.eos_token_id = None
        kind = model.device.type
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(3, model.config.vocab_size, (1, prompt_length), generator=generator).to(model.device)
        start = time.perf_counter()
        respond = Responder(form, model, prompt)
        cold_first = respond(count)
        cold = time.perf_counter() - start
        first = min(seconds(functools.partial(respond, 1), kind) for _ in range(runs))
        total = min(seconds(functools.partial(respond, count), kind) for _ in range(runs))
        peak = torch.cuda.max_memory_allocated() if kind == "cuda" else None
        needed = respond.needed
        # Freed before the next form's model is made.
        del respond, model
        cold_first = None if cold_first is None else cold_first - start
        yield Answer(name, form, cold_first, cold, 1e3 * first, (count - 1) / max(total - first, 1e-9), peak, needed)


class Responder:
    """Generates responses of one form.

    Attributes:
        needed: See `Answer.needed_bytes`.
    """

    def __init__(self, form: str, model: PreTrainedModel, prompt: torch.Tensor) -> None:
        self.needed: int | None = None
        self._model, self._prompt, self._session = model, prompt, None
        if form in THEIR_ANSWERS:
            self._options = {"do_sample": False, **THEIR_ANSWERS[form]}
            return
        self._options = _SAMPLING if form in SAMPLED_ANSWERS else {}
        cache = ExportableCache.from_model(model, model.config.max_position_embeddings)
        self.needed = weights_bytes(model) + cache.nbytes
        self._session = Session.from_model(model, cache, **{**OUR_ANSWERS, **SAMPLED_ANSWERS}[form])

    def __call__(self, tokens: int) -> float | None:
        """Generate tokens, and return the time of the first one if that is known."""
        if self._session is None:
            self._model.generate(self._prompt, max_new_tokens=tokens, min_new_tokens=tokens, **self._options)
            return None
        end = time.perf_counter() + _MOST_WAIT
        # Later responses are those of compiled steps.
        while self._session.length.any() and self._session.pending_graphs and time.perf_counter() < end:
            time.sleep(0.1)
        self._session.reset()
        return [time.perf_counter() for _ in self._session.generate(self._prompt, tokens, **self._options)][0]


def answers_table(answers: Sequence[Answer]) -> Table:
    """Return a table of whole responses."""
    table = Table(title=f"{answers[0].model}: whole responses")
    for column in ("form", "first response", "its first token", "later: first token", "then", "peak of the GPU"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for answer in answers:
        table.add_row(
            answer.form,
            f"{answer.cold_seconds:.1f} s",
            "" if answer.cold_first_seconds is None else f"{answer.cold_first_seconds:.1f} s",
            f"{answer.first_ms:.0f} ms",
            f"{answer.tokens_per_second:.0f} tokens/s",
            "" if answer.peak_bytes is None else f"{answer.peak_bytes / 1e9:.2f} GB",
        )
    return table


def table_of(rows: list[Row]) -> Table:
    """Return one table per model and batch size, with a line per form."""
    table = Table(
        title=f"{rows[0].model}, batch {rows[0].batch}: ms per step, speed of ours over it, "
        "share of the bound by copies, by reads"
    )
    table.add_column("form")
    positions = sorted({row.position for row in rows})
    for position in positions:
        table.add_column(f"@{position}", justify="right")
    by_key = {(row.form, row.position): row for row in rows}
    for form in dict.fromkeys(row.form for row in rows):
        cells = []
        for position in positions:
            row, ours = by_key.get((form, position)), by_key.get((OURS, position))
            ratio = f"{row.ms / ours.ms:.2f}x" if row and ours else ""
            shares = f"{100 * row.bound_ms / row.ms:.0f}% {100 * row.read_bound_ms / row.ms:.0f}%" if row else ""
            cells.append(f"{row.ms:.1f} ms  {ratio}  {shares}" if row else "fails")
        table.add_row(form, *cells)
    return table


def draw(rows: list[Row], path: Path) -> None:
    """Plot time over position: a column per model, a row of panels per batch size."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "loop", "svg.fonttype": "none"})
    colors = {DYNAMIC: "tab:blue", STATIC: "tab:orange", GPT_FAST: "tab:green", OURS: "tab:red"}
    models, batches = list(dict.fromkeys(row.model for row in rows)), list(dict.fromkeys(row.batch for row in rows))
    figure, axes = pyplot.subplots(
        len(batches),
        len(models),
        figsize=(3.6 * len(models), 2.6 * len(batches) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for line, batch in zip(axes, batches, strict=True):
        for axis, model in zip(line, models, strict=True):
            chosen = [row for row in rows if (row.model, row.batch) == (model, batch)]
            for form in dict.fromkeys(row.form for row in chosen):
                points = [(row.position, row.ms) for row in chosen if row.form == form]
                axis.plot(
                    *zip(*points, strict=True),
                    "o-",
                    color=colors[form],
                    linewidth=2.5 if form == OURS else 1,
                    label=form,
                )
            points = dict.fromkeys((row.position, row.bound_ms) for row in chosen)
            axis.plot(*zip(*points, strict=True), ":", color="gray", label="memory bound")
            axis.set_title(f"{model}, batch {batch}", fontsize=9)
            axis.set_ylim(bottom=0)
        line[0].set_ylabel("ms per step")
    for axis in axes[-1]:
        axis.set_xlabel("position, of 4096 allocated")
    labels = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    typer.run(main)
