"""Completions of the demo model, by any completer; run as a program, by the native runner.

Its argument is the bundle. What came of each call is written as JSON. It imports no torch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from exportable_cache.decoding.completion import AnyCompleter, CompletionOptions
from exportable_cache.errors import ExportableCacheError
from exportable_cache.generation.constraint import Constraint
from exportable_cache.generation.sampling_options import SamplingOptions

QUESTION = "the code of amber is 4821. amber?"


def answered(completer: AnyCompleter, ids: list[int], most: int | None = None, **options: Any) -> dict[str, Any]:
    """All of a completion but log probabilities."""
    completion = completer.complete(ids, CompletionOptions(max_new_tokens=most, **options))
    pieces = list(completion)
    return {
        "tokens": [piece.token for piece in pieces],
        "text": "".join(piece.text for piece in pieces),
        "reason": completion.finish_reason,
        "counts": [completion.prompt_tokens, completion.reused_tokens, completion.new_tokens],
        "length": completer.length,
    }


def refusal(completer: AnyCompleter, ids: list[int], **options: Any) -> list[str]:
    try:
        return ["answered", str(answered(completer, ids, **options))]
    except ExportableCacheError as error:
        return [type(error).__name__, str(error)]


def calls(completer: AnyCompleter) -> dict[str, Any]:
    """Return the results that every completer has to give."""
    messages = [{"role": "user", "content": QUESTION}]
    first = completer.encode(messages)
    found: dict[str, Any] = {
        "about": [completer.takes_messages, sorted(completer.end_tokens), completer.max_length, completer.layers],
        "remarks": completer.settings.remarks(),
        "ids": first,
        "first": answered(completer, first),
    }
    messages += [{"role": "assistant", "content": found["first"]["text"]}, {"role": "user", "content": "amber?"}]
    found["second"] = answered(completer, completer.encode(messages))
    # Rules read the whole prompt, what is held of it included.
    penalised = SamplingOptions(repetition_penalty=1.3)
    found["penalised"] = [answered(completer, first, 8, sampling=penalised) for _ in range(2)]
    likely = found["first"]["tokens"][0]
    biased = {"logit_bias": {likely: 3.0, 7: -1.5}, "presence_penalty": 0.75, "frequency_penalty": 1.5}
    found["biased"] = answered(completer, first, 12, **biased)
    found["biased and penalised"] = answered(completer, first, 12, sampling=penalised, **biased)
    text = answered(completer, first, 6, continues=True)["text"]
    found["stopped"] = answered(completer, first, 6, stop=(text[2:4],))
    found["form"] = answered(completer, first, constraint=Constraint("regex", "4822|9157"))
    found["cut form"] = answered(completer, first, 2, constraint=Constraint("regex", "4822|9157"))
    begun = completer.complete(first, CompletionOptions(max_new_tokens=400, sampling=penalised))
    found["begun"] = [next(begun).token, next(begun).token]
    begun.give_up()
    found["given up"] = next(begun, None)
    begun.close()
    found["after it"] = answered(completer, first)["tokens"]
    # Dropped by the next one.
    dropped = completer.complete(first, CompletionOptions(max_new_tokens=400, sampling=penalised))
    next(dropped)
    found["after a dropped one"] = answered(completer, first)["tokens"]
    options = CompletionOptions(max_new_tokens=4, alternatives=3)
    found["logprobs"] = [
        [piece.logprob, [token for token, _ in piece.alternatives], [value for _, value in piece.alternatives]]
        for piece in completer.complete(first, options)
    ]
    most = completer.max_length
    assert most is not None
    long = (first * most)[: most - 3]
    found["full"] = [answered(completer, long, sampling=penalised), completer.is_full]
    found["refused"] = [
        refusal(completer, []),
        refusal(completer, [10**9]),
        refusal(completer, [-1]),
        refusal(completer, [5] * (most + 1)),
        refusal(completer, long, most=5),
        refusal(completer, first, constraint=Constraint("regex", "(")),
    ]
    found["drawn"] = []
    text = completer.encode("the")
    for seed in (1, 1, 2):
        drawn = SamplingOptions(1.5, top_k=50, top_p=0.99, min_p=0.001, seed=seed)
        found["drawn"].append(answered(completer, text, 12, sampling=drawn)["tokens"])
    completer.close()
    return found


if __name__ == "__main__":
    from exportable_cache.decoding.native_completion import NativeCompleter
    from exportable_cache.session.native import open_native

    found = calls(NativeCompleter(open_native(sys.argv[1], known=True)))
    loaded = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
    print(json.dumps({**found, "loaded": loaded}))
