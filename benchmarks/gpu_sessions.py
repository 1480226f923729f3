"""Sessions in every way on a GPU, each compared with the model without a cache: a part of `gpu_check.py`."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from exportable_cache import Session

#: Names of checks, and functions that return (passed, result): None for a measurement or for what was not run.
Checks = Iterator[tuple[str, Callable[[], tuple[bool | None, str]]]]
NEEDS_GPU = "needs a GPU"
#: Largest |logit difference| from the model without a cache, in float32, as in `docs/gpu.md`.
ALLOWED = 1e-3
NEW_TOKENS = 48


def tiny_llama() -> PreTrainedModel:
    """Return a random Llama with full attention."""
    from transformers import LlamaConfig

    return _random(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=512,
            initializer_range=0.2,
        )
    )


def tiny_gemma() -> PreTrainedModel:
    """Return a random Gemma 3, whose layers but the last see a window of 16 tokens."""
    from transformers import Gemma3TextConfig

    return _random(
        Gemma3TextConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=256,
            max_position_embeddings=512,
            sliding_window=16,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            initializer_range=0.2,
        )
    )


def _random(config: Any) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config.pad_token_id = config.eos_token_id = config.bos_token_id = None
    return AutoModelForCausalLM.from_config(config).eval()


class Oracle:
    """A model without a cache: its greedy tokens after a prompt, and its logits at every position."""

    def __init__(self, make: Callable[[], PreTrainedModel], device: str) -> None:
        import torch

        self.make, self.device = make, device
        self.model = make().to(device)
        self.model.set_attn_implementation("eager")
        self.prompt = torch.randint(3, 256, (1, 40), generator=torch.Generator().manual_seed(1)).to(device)
        self.tokens = self.greedy(self.prompt[:, :20])
        self.sequence = torch.cat([self.prompt[:, :20], torch.tensor([self.tokens], device=device)], 1)
        with torch.no_grad():
            self.logits = self.model(self.sequence, use_cache=False).logits[0].float()

    def greedy(self, prompt: torch.Tensor, count: int = NEW_TOKENS) -> list[int]:
        """Return the tokens after a prompt."""
        import torch

        ids = prompt
        with torch.no_grad():
            for _ in range(count):
                ids = torch.cat([ids, self.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        return ids[0, prompt.shape[1] :].tolist()

    def session(self, length: int = 128, batch_size: int = 1, dtype: Any = None, **options: Any) -> Session:
        """Return a session over another copy of the model; options that begin with `cache_` are the cache's."""
        from exportable_cache import ExportableCache, Session

        model = self.make().to(self.device)
        model = model if dtype is None else model.to(dtype)
        sizes = {name.removeprefix("cache_"): options.pop(name) for name in list(options) if name.startswith("cache_")}
        return Session.from_model(model, ExportableCache.from_model(model, length, batch_size, **sizes), **options)

    def logits_of(self, session: Session) -> torch.Tensor:
        """Feed the sequence, a prompt and then step by step, and return the logits [steps, vocab]."""
        import torch

        found = [session.prefill(self.sequence[:, :20])]
        found += [session.decode(self.sequence[:, index]) for index in range(20, self.sequence.shape[1] - 1)]
        return torch.cat(found).float()

    def steps(self, session: Session) -> tuple[bool, str]:
        """Compare the logits of a session with the model's."""
        found = self.logits_of(session)
        difference = (found - self.logits[19:-1]).abs().max().item()
        return difference <= ALLOWED, f"max |logit difference| {difference:.1e} over {len(found)} steps"

    def generates(self, session: Session, **options: Any) -> tuple[bool, str]:
        """Generate, and compare the tokens."""
        return _equal(list(session.generate(self.prompt[:, :20], NEW_TOKENS, **options)), self.tokens)

    def both(self, session: Session) -> tuple[bool, str]:
        """Compare logits, then tokens."""
        right, said = self.steps(session)
        session.reset()
        equal, tokens = self.generates(session)
        return right and equal, f"{said}; {tokens}"


def _equal(found: object, expected: object) -> tuple[bool, str]:
    return found == expected, "tokens equal" if found == expected else "tokens differ"


def sessions(device: str) -> Checks:
    """Run sessions in every way, each compared with the model without a cache."""
    for name, make in (("llama", tiny_llama), ("gemma3", tiny_gemma)):
        oracle: list[Oracle] = []

        def known(make: Callable[[], PreTrainedModel] = make, oracle: list[Oracle] = oracle) -> Oracle:
            # Made within the first check, so that its time counts there.
            if not oracle:
                oracle.append(Oracle(make, device))
            return oracle[0]

        for way, check in ways().items():
            yield f"{name} {way}", lambda check=check, known=known: check(known())
        if device != "cuda":
            yield f"{name}, host waits of eager steps", lambda: (None, NEEDS_GPU)
        else:
            yield f"{name}, host waits of eager steps", lambda known=known: waits(known())


def ways() -> dict[str, Callable[[Oracle], tuple[bool | None, str]]]:
    """Return the ways by name."""
    import torch

    return {
        "eager": lambda oracle: oracle.both(oracle.session()),
        "compiled": lambda oracle: oracle.both(oracle.session(compile="wait")),
        "compiled in the background, 4 steps a launch": _in_background,
        "compiled, bfloat16": lambda oracle: _half(oracle, torch.bfloat16),
        "compiled, float16": lambda oracle: _half(oracle, torch.float16),
        "compiled, 8-bit keys": lambda oracle: _quantized(oracle),
        "ragged batch of 3, compiled": _ragged,
        "continuous batch": _continuous,
        "prompt lookup, compiled": _lookup,
        "draft model": _drafted,
        "saved and loaded": _saved,
        "forked": _forked,
        "shifted, eager and compiled": _shifted,
        "adapters swapped, compiled": _adapted,
        "beams of 3": _beams,
        "sampled, eager and compiled": _sampled,
        "offloaded to the host": lambda oracle: oracle.both(oracle.session(cache_offload="host")),
        "offloaded, 10 responses": _offloaded,
        "offloaded, compiled": lambda oracle: oracle.generates(oracle.session(cache_offload="host", compile="wait")),
        "compiled, mode default": lambda oracle: oracle.generates(oracle.session(compile="wait", mode="default")),
        "token id out of range": _out_of_range,
    }


def _in_background(oracle: Oracle) -> tuple[bool | None, str]:
    """Wait for the graphs of the subprocess, and say if it gave up and this process compiled them."""
    from exportable_cache.errors import InputError

    try:
        session = oracle.session(compile="background", steps_per_launch=4, cache_rollback_slots=4)
    except InputError as error:
        # Graphs without generated code, as on a CPU here, are not compiled in the background.
        return None if oracle.device == "cpu" else False, str(error)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        session.warm_up()
        right, said = oracle.generates(session)
    given_up = [str(one.message) for one in seen if "compiling in the background failed" in str(one.message)]
    session.close()
    return right and not given_up, "; ".join([said, *given_up])


def _half(oracle: Oracle, dtype: torch.dtype) -> tuple[bool, str]:
    """Compare compiled with eager steps, because both round."""
    from loop import ALLOWED as SHARES
    from loop import share_of_spread

    eager, compiled = oracle.session(dtype=dtype), oracle.session(dtype=dtype, compile="wait")
    share = share_of_spread(oracle.logits_of(compiled), oracle.logits_of(eager))
    return share <= SHARES[dtype], f"off by {share:.1e} of the logits' spread"


def _quantized(oracle: Oracle) -> tuple[bool, str]:
    """Compare compiled with eager steps, because rounding moves both away from the model."""
    from loop import share_of_spread

    eager, compiled = (oracle.session(cache_kv_dtype="int8", compile=compile) for compile in (False, "wait"))
    share = share_of_spread(oracle.logits_of(compiled), oracle.logits_of(eager))
    # A value between two steps of the scale may round either way.
    return share <= 1e-2, f"off by {share:.1e} of the logits' spread"


def _ragged(oracle: Oracle) -> tuple[bool, str]:
    session = oracle.session(batch_size=3, compile="wait")
    prompts = [oracle.prompt[0, :20], oracle.prompt[0, 5:17], oracle.prompt[0, 10:40]]
    rows = list(zip(*(step.tolist() for step in session.generate(prompts, 30)), strict=True))
    return _equal([list(row) for row in rows], [oracle.greedy(prompt[None], 30) for prompt in prompts])


def _continuous(oracle: Oracle) -> tuple[bool, str]:
    from exportable_cache.decoding import ContinuousBatch

    batch = ContinuousBatch.from_model(oracle.make().to(oracle.device), max_cache_len=128, batch_size=3)
    prompts = [oracle.prompt[:, start : start + 18] for start in range(0, 20, 4)]
    requests = [batch.submit(prompt, 24) for prompt in prompts]
    list(batch.run())
    return _equal([request.tokens for request in requests], [oracle.greedy(prompt, 24) for prompt in prompts])


def _lookup(oracle: Oracle) -> tuple[bool, str]:
    from exportable_cache.decoding import PromptLookup

    session = oracle.session(compile="wait", score_length=9, cache_rollback_slots=16)
    return oracle.generates(session, draft=PromptLookup())


def _drafted(oracle: Oracle) -> tuple[bool, str]:
    from exportable_cache.decoding import DraftModel

    session, draft = (oracle.session(score_length=5, cache_rollback_slots=16) for _ in range(2))
    return oracle.generates(session, draft=DraftModel(draft, 4))


def _saved(oracle: Oracle) -> tuple[bool, str]:
    import torch

    session = oracle.session()
    session.prefill(oracle.prompt[:, :20])
    with tempfile.TemporaryDirectory() as folder:
        session.save_state(Path(folder) / "state")
        session.reset()
        session.load_state(Path(folder) / "state")
    first = torch.tensor([[oracle.tokens[0]]], device=oracle.device)
    return _equal(list(session.generate(first, 20)), oracle.tokens[1:21])


def _forked(oracle: Oracle) -> tuple[bool, str]:
    session = oracle.session()
    session.prefill(oracle.prompt[:, :20])
    fork = session.fork()
    session.decode(oracle.prompt[:, 20])
    found = fork.decode(oracle.sequence[:, 20])[0].float()
    difference = (found - oracle.logits[20]).abs().max().item()
    return difference <= ALLOWED, f"max |logit difference| {difference:.1e} after the other one's step"


def _shifted(oracle: Oracle) -> tuple[bool, str]:
    """Drop old tokens three times, and compare the steps after that with those of a session on the CPU."""
    import torch

    found = []
    for device, compile in (("cpu", False), (oracle.device, False), (oracle.device, "wait")):
        there = Oracle(oracle.make, device) if device != oracle.device else oracle
        session, logits = there.session(64, compile=compile), []
        session.prefill(there.prompt)
        for _ in range(3):
            session.shift(8, first=4)
            logits += [session.decode(there.sequence[:, index]) for index in range(12)]
        found.append(torch.cat(logits).float().cpu())
    difference = max((one - found[0]).abs().max().item() for one in found[1:])
    return difference <= ALLOWED, f"max |logit difference| {difference:.1e} from the CPU's session after 3 shifts"


def _adapted(oracle: Oracle) -> tuple[bool, str]:
    """Swap two random adapters in one compiled session, and compare with models that have them merged."""
    import torch
    from safetensors.torch import save_file

    session, expected = oracle.session(compile="wait", lora_slots=2, lora_rank=4), {None: oracle.logits[19:-1]}
    generator = torch.Generator().manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            model, tensors = oracle.make(), {}
            for path, layer in model.named_modules():
                if path.endswith(("q_proj", "v_proj")):
                    a = torch.randn(4, layer.in_features, generator=generator) / layer.in_features**0.5
                    b = torch.randn(layer.out_features, 4, generator=generator) / 2
                    layer.weight.data += 2 * b @ a
                    prefix = f"base_model.model.{path}"
                    tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            place = Path(folder) / name
            place.mkdir()
            save_file(tensors, place / "adapter_model.safetensors")
            config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
            (place / "adapter_config.json").write_text(json.dumps(config))
            session.load_adapter(place)
            with torch.no_grad():
                logits = model.to(oracle.device)(oracle.sequence, use_cache=False).logits[0].float()
            expected[name] = logits[19:-1]
    difference = 0.0
    for name in (None, "first", "second", "first", None):
        session.reset()
        session.use_adapter(name)
        difference = max(difference, (oracle.logits_of(session) - expected[name]).abs().max().item())
    apart = min(
        (expected[one] - expected[two]).abs().max().item() for one, two in ((None, "first"), ("first", "second"))
    )
    said = f"max |logit difference| {difference:.1e} over 5 swaps, of adapters {apart:.1e} apart"
    return difference <= ALLOWED and apart > 10 * ALLOWED, said


def _beams(oracle: Oracle) -> tuple[bool, str]:
    """Compare the sum of log probabilities of the best beam with the model's for these tokens."""
    import torch

    from exportable_cache.decoding import beam_search

    best = beam_search(oracle.session(batch_size=3), oracle.prompt[:, :20], 10, length_penalty=0.0)[0]
    tokens = torch.tensor([best.tokens], device=oracle.device)
    with torch.no_grad():
        logits = oracle.model(torch.cat([oracle.prompt[:, :20], tokens], 1), use_cache=False).logits[0].float()
    expected = logits[19:-1].log_softmax(-1).gather(-1, tokens[0, :, None]).sum().item()
    difference = abs(best.score - expected)
    return difference <= 10 * ALLOWED, f"log probability off by {difference:.1e}"


def _offloaded(oracle: Oracle) -> tuple[bool, str]:
    """Repeat responses, because copies that overlap steps may be late once in a while."""
    session, right = oracle.session(cache_offload="host"), 0
    for _ in range(10):
        session.reset()
        right += oracle.generates(session)[0]
    return right == 10, f"{right} of 10 have equal tokens"


def _sampled(oracle: Oracle) -> tuple[bool, str]:
    prompt, options = oracle.prompt[:, :20], {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    eager, compiled = oracle.session(), oracle.session(compile="wait")
    found = [list(session.generate(prompt, 24, **options)) for session in (eager, compiled)]
    compiled.reset()
    found.append(list(compiled.generate(prompt, 24, **options)))
    return found[0] == found[1] == found[2], "one seed gives the same tokens" if found[0] == found[
        2
    ] else "tokens differ"


def _out_of_range(oracle: Oracle) -> tuple[bool, str]:
    import torch

    from exportable_cache.errors import InputError

    session = oracle.session()
    try:
        session.prefill(torch.tensor([[5, 9999]], device=oracle.device))
    except InputError:
        session.prefill(oracle.prompt[:, :4])
        return True, "refused, and the session works on"
    return False, "NOT refused"


def waits(oracle: Oracle) -> tuple[bool | None, str]:
    """Count the times that eager steps wait for the GPU."""
    import torch

    session = oracle.session()
    session.prefill(oracle.sequence[:, :20])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for index in range(20, 29):
            session.stepper.step(oracle.sequence[:, index : index + 1])
        torch.cuda.set_sync_debug_mode("default")
    # Not the one that says that this mode does not detect all synchronizing operations.
    seen = [one for one in seen if "called a synchronizing" in str(one.message)]
    places = sorted({f"{Path(one.filename).name}:{one.lineno}" for one in seen})
    return not seen, f"{len(seen)} in 9 steps {' '.join(places)}"
