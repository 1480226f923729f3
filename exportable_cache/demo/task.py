"""The recall task of the demo model: a prompt states codes and asks for one at the end.

A prompt states facts such as `the code of amber is 4821.`, mixes them with filler sentences and ends with `amber?`. The
right continuation is ` 4821.`. Codes are uniformly random, so only a model that reads the fact through its cache can
answer. The module needs only the standard library, so that any backend can be scored with the same questions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "FILLER_WORDS",
    "NAMES",
    "TOKEN_PATTERN",
    "Fact",
    "Question",
    "accuracy",
    "count_tokens",
    "make_facts",
    "make_filler",
    "make_question",
    "make_questions",
]

NAMES: tuple[str, ...] = tuple(
    """
    acorn amber anchor apple arrow badger bamboo basil birch bison bridge bronze button
    candle canyon cedar cherry cobalt copper coral crane daisy desert dolphin eagle falcon
    feather forest garlic ginger granite harbor heron honey indigo ivory jasmine kettle
    ladder lemon lilac marble meadow mirror needle olive orchid otter paper pebble pepper
    plum quartz rabbit ribbon saffron tiger tulip turtle velvet violet walnut willow zebra
    """.split()
)

_ADJECTIVES = "old small quiet bright warm cold gentle hungry tired lucky".split()
_NOUNS = "farmer baker sailor doctor teacher painter child dog cat horse".split()
_VERBS = "slept waited sang rested walked played worked stopped danced laughed".split()
_PLACES = "garden house market street field kitchen barn library station valley".split()
_UNITS = "minutes hours days weeks years miles".split()
_GLUE = ["the", "code", "of", "is", "in", "near", "behind", "it", "took", "nobody", "saw", "today", "about"]

FILLER_WORDS: tuple[str, ...] = tuple(dict.fromkeys(_GLUE + _ADJECTIVES + _NOUNS + _VERBS + _PLACES + _UNITS))

# The demo tokenizer splits with the same pattern and has one token for every word of the task, so tokens can be counted
# without loading it.
TOKEN_PATTERN = r" ?[A-Za-z]+| ?[0-9]|[^A-Za-z0-9]"


@dataclass(frozen=True)
class Fact:
    """A name and its code of four digits."""

    name: str
    code: str

    @property
    def sentence(self) -> str:
        """Sentence of a prompt that states the fact."""
        return f"the code of {self.name} is {self.code}."


@dataclass(frozen=True)
class Question:
    """A prompt, its right continuation, and the distance to the fact.

    Attributes:
        prompt: Text for the model, which ends in `<name>?`.
        answer: Right continuation, with a leading space and a full stop.
        name: Name that is asked about.
        distance: Tokens from the end of the fact to the end of the prompt. A layer with a window of at most this size
            does not see the fact.
        tokens: Length of the prompt in tokens of the demo tokenizer.
    """

    prompt: str
    answer: str
    name: str
    distance: int
    tokens: int


def count_tokens(text: str) -> int:
    """Count the demo tokenizer's tokens in text of this task."""
    return len(re.findall(TOKEN_PATTERN, text))


def make_facts(rng: random.Random, count: int) -> list[Fact]:
    """Return `count` facts with distinct names and independent uniform codes."""
    names = rng.sample(NAMES, count)
    return [Fact(name, "".join(rng.choices("0123456789", k=4))) for name in names]


def make_filler(rng: random.Random, unused: Sequence[str]) -> str:
    """Return a random sentence that states no code.

    Args:
        rng: Source of randomness.
        unused: Names that the sentence may mention. They should have no fact in the prompt.
    """
    kind = rng.random()
    if kind < 0.6 or (kind >= 0.8 and not unused):
        place = f"{rng.choice(['in', 'near', 'behind'])} the {rng.choice(_PLACES)}"
        return f"the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)} {rng.choice(_VERBS)} {place}."
    if kind < 0.8:
        return f"it took about {rng.randint(2, 99)} {rng.choice(_UNITS)}."
    return f"nobody saw {rng.choice(unused)} today."


def make_question(rng: random.Random, facts: int = 8, fillers: int = 4, min_distance: int = 0) -> Question:
    """Return a random question.

    Args:
        rng: Source of randomness; equal states give equal questions.
        facts: Number of facts, at most `len(NAMES)`.
        fillers: Number of filler sentences, at random positions among the facts.
        min_distance: Minimum number of tokens from the end of the fact to the end of the prompt.

    Raises:
        ValueError: If no fact is that far back.
    """
    stated = make_facts(rng, facts)
    used = {fact.name for fact in stated}
    unused = [name for name in NAMES if name not in used]
    parts: list[Fact | str] = [*stated, *(make_filler(rng, unused) for _ in range(fillers))]
    rng.shuffle(parts)

    # The final " <name>?" has two tokens, because a name with its leading space is one.
    distance = 2
    candidates: list[tuple[Fact, int]] = []
    for part in reversed(parts):
        if isinstance(part, Fact):
            if distance >= min_distance:
                candidates.append((part, distance))
            distance += count_tokens(" " + part.sentence)
        else:
            distance += count_tokens(" " + part)
    if not candidates:
        raise ValueError(f"no fact lies {min_distance} tokens before the end of the prompt")

    asked, asked_distance = rng.choice(candidates)
    sentences = [part.sentence if isinstance(part, Fact) else part for part in parts]
    prompt = " ".join([*sentences, f"{asked.name}?"])
    return Question(prompt, f" {asked.code}.", asked.name, asked_distance, count_tokens(prompt))


def make_questions(
    count: int,
    seed: int = 0,
    facts: tuple[int, int] = (5, 20),
    fillers: tuple[int, int] = (0, 8),
    min_distance: int = 0,
    tokens: tuple[int, int] = (0, 1_000_000),
) -> list[Question]:
    """Return `count` questions that depend only on the arguments.

    Args:
        count: Number of questions.
        seed: Seed of the generator.
        facts: Smallest and largest number of facts in a prompt.
        fillers: Smallest and largest number of filler sentences in a prompt.
        min_distance: See `make_question`.
        tokens: Smallest and largest length of a prompt in tokens; other prompts are drawn again.

    Raises:
        ValueError: If almost no prompt meets the bounds.
    """
    rng = random.Random(seed)
    questions: list[Question] = []
    for _ in range(1000 * max(count, 1)):
        if len(questions) == count:
            return questions
        try:
            question = make_question(rng, rng.randint(*facts), rng.randint(*fillers), min_distance)
        except ValueError:
            continue
        if tokens[0] <= question.tokens <= tokens[1]:
            questions.append(question)
    if len(questions) == count:
        return questions
    raise ValueError("the bounds on facts, fillers, distance and tokens fit almost no prompt")


def accuracy(answer: Callable[[str], str], questions: Iterable[Question]) -> float:
    """Return the share of questions that a backend answers with the right code.

    Surrounding whitespace and text after the answer's full stop are ignored, so that a backend may run a fixed number
    of steps.

    Args:
        answer: Function from a prompt to the generated text without the prompt.
        questions: The questions.
    """
    results = [answer(q.prompt).strip().startswith(q.answer.strip()) for q in questions]
    if not results:
        raise ValueError("accuracy needs at least one question")
    return sum(results) / len(results)
