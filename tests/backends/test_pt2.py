"""The `.pt2` archive: weights once, one cache under both methods, damage refused."""

import json
import zipfile
from pathlib import Path

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends import backend_for
from exportable_cache.backends.pt2.archive import read_archive, write_archive
from exportable_cache.errors import BundleError, InputError
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.forked import run_python
from ..support.models import hybrid_model, tiny_model, tokens
from ..support.oracle import difference, reference_logits
from ..support.sessions import exported_bundle, lowered_session


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    model = tiny_model("mistral", hidden_size=128, intermediate_size=1024, vocab_size=4096)
    program = Program(model, ExportableCache.from_model(model, 64), ProgramSpec(16))
    exported = {name: program.export(name) for name in program.methods}
    path = tmp_path_factory.mktemp("archive") / "program.pt2"
    write_archive(path, exported, "prefill")
    return model, exported, path


def test_the_file_holds_the_weights_once(archive) -> None:
    model, exported, path = archive
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights > 5_000_000
    assert weights < path.stat().st_size < 1.5 * weights


def test_writing_leaves_the_exported_programs_as_they_were(archive) -> None:
    model, exported, _ = archive
    own = dict(model.named_parameters())
    for program in exported.values():
        assert program.state_dict["model.lm_head.weight"].data_ptr() == own["lm_head.weight"].data_ptr()
        assert program.constants["layers_0_keys"].shape == (1, 2, 8, 8)


def test_methods_share_weights_and_cache_in_memory(archive) -> None:
    _, _, path = archive
    programs = read_archive(path)
    assert set(programs) == {"decode", "prefill"}
    for name, tensor in programs["decode"].weights.items():
        assert name.startswith("lifted_tensor") or programs["prefill"].weights[name].data_ptr() == tensor.data_ptr()
    programs["prefill"].module(tokens(5), torch.tensor([0]))
    assert programs["decode"].state["layers_0_keys"].abs().sum() > 0


def test_a_truncated_file_is_refused(archive, tmp_path) -> None:
    _, _, path = archive
    damaged = tmp_path / "program.pt2"
    damaged.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BundleError, match="export the model again"):
        read_archive(damaged)


def test_the_file_says_nothing_of_the_machine_that_made_it(archive) -> None:
    _, _, path = archive
    assert str(Path(torch.__file__).parent.parent).encode() not in path.read_bytes()


def test_torch_opens_it_without_this_package(archive) -> None:
    model, _, path = archive
    # The two lines that README.txt inside the file gives.
    with zipfile.ZipFile(path) as entries:
        lines = [
            line.strip()
            for line in entries.read("program/extra/README.txt").decode().splitlines()
            if line.startswith("    ")
        ]
    ids = tokens(6).tolist()
    script = "\n".join(
        [
            "import sys, torch",
            f"path, ids = {str(path)!r}, torch.tensor({ids})",
            "first = torch.export.load(path).module()(ids[:, :5], torch.tensor([0]))",
            *lines,
            "step = {name: program.module() for name, program in programs.items()}",
            "assert torch.equal(first, step['prefill'](ids[:, :5], torch.tensor([0])))",
            "print(step['decode'](ids[:, 5:], torch.tensor([5])).argmax().item())",
            "assert 'exportable_cache' not in sys.modules",
        ]
    )
    found = run_python(script, cwd=path.parent)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) == reference_logits(model, torch.tensor(ids), 5)[:, -1].argmax().item()


def test_torch_opens_one_whose_cache_is_an_input_without_this_package() -> None:
    # As in cli/test_elsewhere.py.
    model = tiny_model("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    ids, folder = tokens(5), exported_bundle(model, "pt2", prefill_chunk=4, verify=False, form="explicit")
    with zipfile.ZipFile(folder / "program.pt2") as entries:
        said = entries.read("program/extra/README.txt").decode()
    script = "\n".join(
        [
            "import sys, torch",
            "path, input_ids, input_pos = 'program.pt2', torch.tensor([[5, 6, 7]]), torch.tensor([0])",
            *(line.strip() for line in said.splitlines() if line.startswith("    ")),
            f"ids = torch.tensor({ids.tolist()})",
            "assert cache['layers'][0]['cumulative_length'].tolist() == [3]",
            "logits, cache = programs['prefill'].module()(ids[:, :4], torch.tensor([0]), cache)",
            "logits, cache = programs['decode'].module()(ids[:, 4:], torch.tensor([4]), cache)",
            "assert 'exportable_cache' not in sys.modules",
            "print(logits.tolist())",
        ]
    )
    found = run_python(script, cwd=folder)
    assert found.returncode == 0, found.stderr
    expected = reference_logits(model, ids, 4)[:, -1]
    assert (torch.tensor(json.loads(found.stdout)) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("options", [{"form": "explicit"}, pytest.param({"strict": True}, marks=pytest.mark.full)])
def test_options(options: dict) -> None:
    model = hybrid_model()
    session = lowered_session(model, "pt2", **options)
    ids = tokens(50)
    reference = reference_logits(model, ids, 20)

    def step(piece: torch.Tensor, session: Session = session) -> torch.Tensor:
        return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

    assert difference(step, reference, ids, 20) <= 1e-4
    session.reset()
    assert difference(step, reference, ids, 20) <= 1e-4


@pytest.mark.parametrize("options", [{"quantize": True}, {"form": "other"}])
def test_unknown_options_are_refused(options: dict) -> None:
    with pytest.raises(InputError):
        backend_for("pt2").options.parse(options)
