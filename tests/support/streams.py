"""Requests to a server with OpenAI's API, and their streamed text."""

from __future__ import annotations

import http.client
import json
import random
from typing import Any

_WORDS = ["amber", "paper", "stone", "river", "it rested.", "the code of", "is 4821.", "is 77."]


def requests(count: int, models: list[str], words: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return requests of mixed lengths with shared beginnings, greedy and drawn with a seed.

    Args:
        count: Number of requests.
        models: Names of models, which they ask for in turn.
        words: Largest number of words after the shared beginning.
        seed: Seed of what is drawn.
    """
    chooses = random.Random(seed)
    shared = [" ".join(chooses.choices(_WORDS, k=size)) for size in (0, 6, 20)]
    return [
        {
            "model": models[index % len(models)],
            "prompt": f"{chooses.choice(shared)} {' '.join(chooses.choices(_WORDS, k=chooses.randint(1, words)))}",
            "max_tokens": chooses.choice([1, 3, 6, 12]),
            "temperature": chooses.choice([0, 1.0]),
            "seed": chooses.randint(0, 99),
            "stream": True,
        }
        for index in range(count)
    ]


def streamed(address: str, body: dict[str, Any], leave_after: int | None = None) -> str | None:
    """Return the text of a streamed response; None if the client left after so many chunks.

    Raises:
        RuntimeError: If the server refuses the request.
    """
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply, text, count = connection.getresponse(), "", 0
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.read()[:200]!r}")
        for line in reply:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                count += 1
            if count == leave_after:
                return None
        return text
    finally:
        connection.close()
