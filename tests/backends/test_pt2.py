"""The `.pt2` archive: weights once, one cache under both methods, damage refused."""

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends import backend_for
from exportable_cache.backends.pt2.archive import read_archive, write_archive
from exportable_cache.errors import BundleError, InputError
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits
from ..support.sessions import lowered_session


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    model = tiny_model("mistral", hidden_size=128, intermediate_size=1024, vocab_size=4096)
    program = Program(model, ExportableCache.from_model(model, 64), ProgramSpec(16))
    exported = {name: program.export(name) for name in program.methods}
    path = tmp_path_factory.mktemp("archive") / "program.pt2"
    write_archive(path, exported)
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
    modules = {name: dict(program.module().named_parameters()) for name, program in read_archive(path).items()}
    assert set(modules) == {"decode", "prefill"}
    programs = read_archive(path)
    for name, tensor in programs["decode"].state_dict.items():
        assert programs["prefill"].state_dict[name].data_ptr() == tensor.data_ptr()
    loaded = {name: program.module() for name, program in programs.items()}
    loaded["prefill"](tokens(5), torch.tensor([0]))
    written = loaded["decode"].get_buffer("layers_0_keys")
    assert written.abs().sum() > 0


def test_a_truncated_file_is_refused(archive, tmp_path) -> None:
    _, _, path = archive
    damaged = tmp_path / "program.pt2"
    damaged.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BundleError, match="export the model again"):
        read_archive(damaged)


@pytest.mark.parametrize("options", [{"form": "explicit"}, {"strict": True}])
def test_options(options: dict) -> None:
    model = tiny_model("gemma3_text")
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
