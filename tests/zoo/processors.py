"""Images and audio as the processors of published checkpoints make them: sizes, tiles, patches and token counts in kind.

`published/media/processors.json` lists the settings of each processor with their source. The widths and depths of the
model are shrunk, and the images, tiles, patches and frames are those of the checkpoint. `make zoo-media` runs them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import transformers
from transformers import PreTrainedModel

from exportable_cache import ExportableCache
from exportable_cache.errors import InputError
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.inputs.modality import Modality
from exportable_cache.program.inputs.probe import prompt_with

from . import check
from .architectures import Architecture, architectures
from .build import tokens
from .check import TOLERANCE, Outcome, _outcome_of
from .media import RESULTS, STEPS, TARGETS, _session, media_rows, reference, tiny_media_model
from .media_items import TOWERS, Item, seen_by
from .media_table import KEPT, PUBLISHED, write_media_table
from .shrink import FIRST_TOKEN, VOCAB

FOLDER = Path(__file__).parent / "published" / "media"
#: Pieces of text around items: one item, and two.
PROMPTS = ((2, 3), (3, 2, 5))


@dataclass(frozen=True)
class Published:
    """The processor of a published checkpoint.

    Attributes:
        checkpoint: Its name: `llava-hf/llava-1.5-7b-hf`.
        model_type: Its model type.
        source: Where the facts come from.
        processor: Class of the image processor or feature extractor, in transformers.
        settings: Its settings.
        towers: Fields of the model's configs that shapes depend on, by model type.
        sizes: Heights and widths of images in pixels, or lengths of audio in seconds.
        run: Placeholders between two other tokens of an item, or `row` for those of a row of patches; 0 for all.
        nested: True if the processor takes the images of each prompt as a list.
    """

    checkpoint: str
    model_type: str
    source: str
    processor: str
    settings: dict[str, Any] = field(hash=False)
    towers: dict[str, Any] = field(hash=False)
    sizes: list[Any] = field(hash=False)
    run: int | str = 0
    nested: bool = False

    @property
    def kind(self) -> str:
        """`image` or `audio`."""
        return "audio" if "FeatureExtractor" in self.processor else "image"

    def model(self) -> PreTrainedModel:
        """Return the tiny model whose encoder takes items of the published sizes."""
        row = next(row for row in _rows() if row.model_type == self.model_type)
        merged = {name: {**TOWERS.get(name, {}), **fields} for name, fields in self.towers.items()}
        with mock.patch.dict(TOWERS, merged):
            return tiny_media_model(row)

    def items(self, model: PreTrainedModel, size: Any, seeds: Sequence[int]) -> Item:
        """Return what the processor makes of the random items of one prompt, as far as the model takes it."""
        given = [_random_item(self.kind, size, seed) for seed in seeds]
        if self.kind == "audio":
            # As processors do, because without it a mask counts samples instead of frames.
            masked = self.settings.get("return_attention_mask")
            made = self._made(given, sampling_rate=self.settings["sampling_rate"], return_attention_mask=masked)
        else:
            made = self._made([given] if self.nested else given)
        # Qwen2-Audio and others rename it, because `attention_mask` is that of the text.
        if "attention_mask" in made:
            made["feature_attention_mask"] = made.pop("attention_mask")
        taken = inspect.signature(model.forward).parameters
        return {name: value for name, value in made.items() if name in taken}

    def _made(self, given: list[Any], **options: Any) -> Item:
        made = dict(_class_of(self.processor)(**self.settings)(given, return_tensors="pt", **options))
        return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}


@functools.cache
def _rows() -> tuple[Architecture, ...]:
    return (*media_rows(), *(row for row in architectures() if row.group == "speech"))


@functools.cache
def published() -> tuple[Published, ...]:
    """Return the processors of all listed checkpoints."""
    return tuple(Published(**row) for path in sorted(FOLDER.glob("*.json")) for row in json.loads(path.read_text()))


def _class_of(name: str) -> Any:
    # Those of Pillow are not exported where torchvision is missing.
    stem = {"GotOcr2": "got_ocr2", "SmolVLM": "smolvlm", "Qwen2VL": "qwen2_vl", "CLIP": "clip"}
    prefix = name.removesuffix("ImageProcessorPil")
    if prefix == name:
        return getattr(transformers, name)
    folder = stem.get(prefix) or "".join(f"_{one.lower()}" if one.isupper() else one for one in prefix).lstrip("_")
    return getattr(importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}"), name)


def _random_item(kind: str, size: Any, seed: int) -> Any:
    generator = numpy.random.default_rng(seed)
    if kind == "audio":
        return generator.standard_normal(int(size * 16000)).astype("float32")
    return generator.integers(0, 256, (*size, 3), dtype="uint8")


def check_published(row: Published, target: str = "eager") -> Outcome:
    """Check one checkpoint on one target: every size on `eager`, the first one on others."""
    start = time.monotonic()
    try:
        model = row.model()
        sizes = row.sizes if target == "eager" else row.sizes[:1]
        if model.config.is_encoder_decoder:
            outcome = _worst([_encoded(row, model, size, target) for size in sizes])
        else:
            found = [modalities_of(model, {row.kind: row.items(model, size, [1])})[0] for size in row.sizes]
            outcome = _worst([_placed(row, model, found, index, target) for index in range(len(sizes))])
    except Exception as error:  # any model's code runs here
        outcome = _outcome_of(error)
    outcome.seconds = round(time.monotonic() - start, 1)
    return outcome


def _worst(found: Sequence[Outcome]) -> Outcome:
    """Return the outcome of largest difference, with the token counts of all sizes as its reason."""
    worst = max(found, key=lambda one: (one.status != "pass", one.difference or 0.0))
    return Outcome(worst.status, worst.difference, "; ".join(one.reason for one in found))


def _encoded(row: Published, model: PreTrainedModel, size: Any, target: str) -> Outcome:
    """Check an encoder-decoder whose encoder takes the item."""
    ids, inputs = tokens(model), row.items(model, size, [1])
    with torch.no_grad():
        outcome = check._run(model, target, (ids, inputs, check._references(model, ids, inputs, {})), {})
    frames = next(iter(inputs.values())).shape[-1]
    outcome.reason = f"{_named(row, size)}: {frames} frames"
    return outcome


@torch.no_grad()
def _placed(row: Published, model: PreTrainedModel, modalities: Sequence[Modality], index: int, target: str) -> Outcome:
    """Check a model whose decoder takes an item's embeddings: a session for items of one size, fed with all sizes."""
    size, modality = row.sizes[index], modalities[index]
    prompts = [_prompt(row, model, modality, size, pieces) for pieces in PROMPTS[: 2 if target == "eager" else 1]]
    following = torch.randint(FIRST_TOKEN, VOCAB, (1, STEPS), generator=torch.Generator().manual_seed(5))
    expected = [reference(model, prompt, following) for prompt in prompts]
    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    # Prompts of other sizes must fit too; of ten placeholders, at most one is followed by another token.
    cache = ExportableCache.from_model(model, longest + max(one.tokens for one in modalities) * 11 // 10 + STEPS + 4)
    difference = 0.0
    with _session(model, cache, modality, target, longest if modality.facts.sees else min(64, longest)) as session:
        for prompt, logits in zip(prompts, expected):
            session.reset()
            given = {name: tensor for name, tensor in prompt.items() if "token_type" not in name}
            rows = [session.prefill(**given)] + [session.decode(following[:, step]) for step in range(STEPS)]
            difference = max(difference, (torch.stack(rows, 1) - logits).abs().max().item())
        for other, found in zip(row.sizes, modalities) if target == "eager" else ():
            session.reset()
            prompt = _prompt(row, model, found, other, PROMPTS[0])
            if other != size and not _is_right_or_refused(model, modality, session, prompt):
                return Outcome("wrong", None, f"{_named(row, other)} is taken for {_named(row, size)}")
    limit = TOLERANCE * max(1.0, max(logits.abs().max().item() for logits in expected) / 10)
    counted = f"{_named(row, size)}: {modality.tokens} tokens"
    return Outcome("pass" if difference <= limit else "wrong", difference, counted)


def _is_right_or_refused(model: PreTrainedModel, modality: Modality, session: Any, prompt: Item) -> bool:
    """Return True if a session gives the model's logits for a prompt of another size, or names the input."""
    given = {name: tensor for name, tensor in prompt.items() if "token_type" not in name}
    names = [spec.name for spec in modality.inputs] + list(modality.facts.fixed)
    try:
        logits = session.prefill(**given)
    except InputError as error:
        return any(name in str(error) for name in names)
    expected = reference(model, prompt, torch.empty(1, 0, dtype=torch.int64))[:, 0]
    return bool((logits - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max().item() / 10))


def _named(row: Published, size: Any) -> str:
    return f"{size} s" if row.kind == "audio" else "x".join(map(str, size))


def _prompt(row: Published, model: PreTrainedModel, modality: Modality, size: Any, pieces: tuple[int, ...]) -> Item:
    together = row.items(model, size, range(1, len(pieces)))
    given = prompt_with(model, modality.kind, pieces, modality.tokens, modality.token_id, **together)
    random = torch.randint(
        FIRST_TOKEN, VOCAB, given["input_ids"].shape, generator=torch.Generator().manual_seed(sum(pieces))
    )
    given["input_ids"] = torch.where(given["input_ids"] < FIRST_TOKEN, given["input_ids"], random)
    run = _patches_of_a_row(row, together) if row.run == "row" else int(row.run)
    if run:
        given = _broken(given, modality.token_id, run)
    given |= seen_by(given["input_ids"], modality.token_id, together)
    if modality.facts.sees == "prompt":
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    return given


def _patches_of_a_row(row: Published, items: Item) -> int:
    patch = row.settings.get("patch_size", {"width": 16})["width"]
    return int(items["pixel_values"].shape[-1]) // patch


def _broken(given: Item, token_id: int, run: int) -> Item:
    """Return the prompt with a text token after each run of placeholders, as between rows or tiles."""
    ids: list[int] = []
    count = 0
    for token in given["input_ids"][0].tolist():
        ids.append(token)
        count = count + 1 if token == token_id else 0
        if count == run:
            ids.append(FIRST_TOKEN + 1)
            count = 0
    input_ids = torch.tensor([ids])
    marks = {name: (input_ids == token_id).long() for name in given if "token_type" in name}
    masks = {name: torch.ones_like(input_ids) for name in given if name == "attention_mask"}
    return {**given, "input_ids": input_ids, **masks, **marks}


def result_of(row: Published, targets: Sequence[str], known: dict[str, Any]) -> dict[str, Any]:
    """Return the outcomes of a checkpoint by target, those of `known` included; targets run what passes in eager."""
    found = dict(known)
    for target in targets:
        if target == "eager" or found.get("eager", {}).get("status") == "pass":
            outcome = check_published(row, target)
            found[target] = {name: getattr(outcome, name) for name in KEPT}
            print(row.checkpoint, target, found[target], outcome.seconds, flush=True)
    return found


def main() -> None:
    """Run the processors of some checkpoints, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.processors", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="checkpoints, comma-separated")
    parser.add_argument("--targets", default=",".join(TARGETS))
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for row in published():
        if not arguments.only or row.checkpoint in arguments.only.split(","):
            found = result_of(
                row, arguments.targets.split(","), json.loads(PUBLISHED.read_text()).get(row.checkpoint, {})
            )
            # Read again, because another run may have written meanwhile.
            known = {**json.loads(PUBLISHED.read_text()), row.checkpoint: found}
            kept = {one.checkpoint: known[one.checkpoint] for one in published() if one.checkpoint in known}
            PUBLISHED.write_text(json.dumps(kept, indent=1) + "\n")
    write_media_table(RESULTS)


if __name__ == "__main__":
    main()
