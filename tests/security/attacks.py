"""What is attacked by `make fuzz`: bundles, saved states, saved caches, and folders of compiled graphs."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from typer.testing import CliRunner

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.bundle.files import MANIFEST_FILE, checksum_of
from exportable_cache.cli.app import app
from exportable_cache.common.fs import user_files
from exportable_cache.common.fs.tensor_files import write_tensors
from exportable_cache.common.fs.user_files import user_key
from exportable_cache.errors import InputError

from ..support.models import hybrid_model, tiny_model, tokens
from .mutations import MUTATIONS, mutate, mutate_archive, strange
from .operators import PROGRAM, Pool, random_program, run_program, write_pool

GRAPHS = "graphs"
OPERATORS = "operators"
_PROMPT = [5, 6, 7]
_STEPS = 3


def reseal(folder: Path) -> None:
    """Make every checksum right again."""
    path = folder / MANIFEST_FILE
    try:
        fields = json.loads(path.read_text())
        for name, file in fields["files"].items():
            if (folder / name).is_file():
                content = (folder / name).read_bytes()
                file.update(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
        fields["checksum"] = checksum_of(fields)
        path.write_text(json.dumps(fields))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # no manifest any more


class Attack:
    """One kind of thing that is opened, and how.

    Args:
        source: The folder, whole.
        use: Opens a folder and gives numbers that an unharmed one gives.
        change: Mutates a copy.
        sealed: Makes checksums right, where that is asked for.
    """

    def __init__(
        self,
        name: str,
        source: Path,
        use: Callable[[Path], Any],
        change: Callable[[Path, random.Random], None],
        sealed: Callable[[Path], None] | None = None,
    ) -> None:
        self.name, self.source, self.use, self.change, self.sealed = name, source, use, change, sealed

    def mutated(self, seed: int, work: Path) -> Path:
        """A copy, changed."""
        folder = work / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.source, folder)
        self.change(folder, random.Random(seed))
        if self.sealed is not None:
            self.sealed(folder)
        return folder


def _answer(session: Session) -> list[float]:
    logits = session.prefill(torch.tensor([_PROMPT]))
    found = logits[0, :8].tolist()
    for _ in range(_STEPS):
        logits = session.decode(logits.argmax(-1))
        found += logits[0, :8].tolist()
    return found


def _opened(folder: Path) -> list[float]:
    return _answer(load(folder))


def _any_file(folder: Path, choose: random.Random) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = choose.choice(files)
    # In large files the tables, not the weights: those may be anything.
    mutate(path, choose, None if path.stat().st_size < 100_000 else choose.choice((4096, 100_000)))


def _program(folder: Path, choose: random.Random) -> None:
    path = next(path for path in folder.iterdir() if path.name.startswith("program"))
    if path.suffix == ".pt2" and choose.random() < 0.8:
        mutate_archive(path, choose)
    else:
        mutate(path, choose, None if path.suffix == ".pt2" else 60_000)


def _manifest(folder: Path, choose: random.Random) -> None:
    path = folder / MANIFEST_FILE
    fields = json.loads(path.read_text())
    fields.pop("checksum")
    strange(fields, choose)
    path.write_text(json.dumps(fields))


def _opened_and_inspected(folder: Path) -> list[float]:
    """Numbers of a bundle that is shown to a person first.

    Raises:
        RuntimeError: If showing it fails, or shows what a terminal obeys.
    """
    shown = CliRunner().invoke(app, ["inspect", str(folder)])
    if shown.exit_code not in (0, 2) or not shown.output.replace("\n", "").isprintable():
        raise RuntimeError(f"inspect exits with {shown.exit_code}: {shown.output[-300:]!r}")
    return _opened(folder)


def _saved_parts(folder: Path, choose: random.Random) -> None:
    """Change a saved state or cache in its parts, and make its checksum right again."""
    path = next(folder.iterdir())
    with safe_open(path, "pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name).clone() for name in file.keys()}
    metadata.pop("checksum")
    if choose.random() < 0.5:
        name = choose.choice(sorted(metadata))
        document = {"": _parsed(metadata[name])}
        strange(document, choose)
        value = document.get("")
        metadata[name] = value if isinstance(value, str) and value.isascii() else json.dumps(value)
    else:
        name = choose.choice(sorted(tensors))
        tensor = tensors[name]
        dim = choose.randrange(max(tensor.dim(), 1))
        changes: list[Callable[[], Any]] = [
            lambda: tensor.narrow(dim, 0, choose.randint(0, tensor.shape[dim])),
            lambda: torch.cat([tensor, tensor], dim),
            lambda: tensor.to(choose.choice((torch.float16, torch.int8, torch.bool, torch.int64, torch.float64))),
            lambda: tensor[None],
            lambda: tensor.select(dim, 0),
            lambda: torch.full_like(tensor, choose.choice((0, 1, -1, 21, 2**62))),
            lambda: torch.full_like(tensor, float("nan")),
        ]
        with suppress(RuntimeError, IndexError, ValueError):
            tensors[name] = choose.choice(changes)()
        if choose.random() < 0.1:
            tensors[choose.choice(("x", "layers.9.keys", "encoded.0", "\x1b[2J"))] = tensors.pop(name)
    write_tensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _only_file(folder: Path, choose: random.Random) -> None:
    mutate(next(folder.iterdir()), choose, choose.choice((None, 2000)))


def attacks(work: Path, targets: list[str], bundles: Path | None = None) -> list[Attack]:
    """Everything that is attacked, made now, but for bundles that are in `bundles` already."""
    found = []
    if OPERATORS in targets:
        found.append(_operator_attack(work))
        targets = [target for target in targets if target != OPERATORS]
        if not targets:
            return found
    for target in targets:
        if target == GRAPHS:
            found += _graph_attacks(work)
            continue
        source, small = ((bundles or work) / name for name in (target, f"{target}_small"))
        if not source.exists():
            export("demo", target, 96, source, prefill_chunk=16, verify=False)
        # Of one layer: most of what a mutation costs is reading the rest.
        if not small.exists():
            model = hybrid_model(num_hidden_layers=1, layer_types=["sliding_attention"])
            export(model, target, 32, small, prefill_chunk=8, verify=False)
        found += [
            Attack(f"{target}, any file, unsealed", source, _opened, _any_file),
            Attack(f"{target}, any file, sealed", source, _opened, _any_file, reseal),
            Attack(f"{target}, program, sealed", small, _opened, _program, reseal),
            Attack(f"{target}, manifest, sealed", small, _opened_and_inspected, _manifest, reseal),
        ]
    model = hybrid_model()
    session = Session.from_model(model, ExportableCache.from_model(model, 48))
    session.prefill(tokens(20))
    (work / "state").mkdir()
    session.save_state(work / "state" / "state.safetensors")
    (work / "cache").mkdir()
    session.cache.save(work / "cache" / "cache.safetensors")

    def state(folder: Path) -> list[float]:
        other = Session.from_model(model, ExportableCache.from_model(model, 48))
        other.load_state(folder / "state.safetensors")
        return other.decode(torch.tensor([3]))[0, :8].tolist()

    def cache(folder: Path) -> list[float]:
        loaded = ExportableCache.load(folder / "cache.safetensors")
        with torch.no_grad():
            direct = model(torch.tensor([[3]]), past_key_values=loaded).logits[0, -1, :8].tolist()
        loaded = ExportableCache.load(folder / "cache.safetensors")
        return direct + Session.from_model(model, loaded).decode(torch.tensor([3]))[0, :8].tolist()

    session.close()
    for name, use in (("session state", state), ("saved cache", cache)):
        source = work / name.split()[-1]
        found.append(Attack(f"{name}, unsealed", source, use, _only_file))
        found.append(Attack(f"{name}, sealed", source, use, _saved_parts))
    return found


def _operator_attack(work: Path) -> Attack:
    """Random operators with random arguments in a program whose file is whole."""
    source = work / OPERATORS
    source.mkdir()
    write_pool(source / PROGRAM)
    pool = Pool(source / PROGRAM)
    return Attack(
        "`pt2`, random operators, sealed",
        source,
        run_program,
        lambda folder, choose: random_program(folder / PROGRAM, choose, pool),
    )


def _graph_attacks(work: Path) -> list[Attack]:
    """On a folder of compiled graphs: damaged, and one that somebody else has planted, whole or not."""
    model = tiny_model("llama", num_hidden_layers=1)
    source = work / GRAPHS
    child = os.fork()
    if child == 0:
        # Compiling starts threads.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        try:
            _graph(model, source, compile=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError("no graph was kept")

    def opened(folder: Path) -> list[float]:
        return _graph(model, folder, compile=False)

    def planted(folder: Path, choose: random.Random) -> None:
        path = next(folder.iterdir())
        content = user_files.unsealed(path.read_bytes(), user_key(), path.name)
        if choose.random() < 0.5:
            content = choose.choice(MUTATIONS)(content, choose)
        # By somebody who does not know the key, or can write there, too.
        if choose.random() < 0.5:
            path.write_bytes(user_files.sealed(content, choose.randbytes(32), path.name))
        else:
            path.write_bytes(user_files.sealed(content, user_key(), path.name))
            choose.choice((path, folder)).chmod(choose.choice((0o777, 0o766, 0o722)))

    return [
        Attack("graph cache, damaged", source, opened, _only_file),
        Attack("graph cache, planted by others, sealed", source, opened, planted),
    ]


def _graph(model: Any, folder: Path, compile: bool) -> list[float]:
    """Logits of a step by a graph from a folder, which is compiled first where asked for.

    Raises:
        InputError: If no graph is taken from it. (A session compiles one then.)
    """
    if not compile:
        torch.compile = _not_compiled
    cache = ExportableCache.from_model(model, 16)
    with Session.from_model(model, cache, compile="wait", buckets=False, graph_cache=folder) as session:
        return session.decode(torch.tensor([3]))[0, :8].tolist()


def _not_compiled(*arguments: Any, **options: Any) -> Any:
    raise InputError("no graph is taken from the folder")
