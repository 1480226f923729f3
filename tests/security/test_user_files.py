"""What is unpickled is the user's own: graph caches in folders that others can write to are refused."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live.graph_cache import GraphCache, packed, unpacked
from exportable_cache.common.fs import user_files
from exportable_cache.common.fs.user_files import user_key
from exportable_cache.errors import InputError

from ..support.models import tiny_model

pytestmark = pytest.mark.skipif(not user_files.HAS_OWNERS, reason="the system does not say whose a file is")


def _open(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return user_files.is_user_file(descriptor)
    finally:
        os.close(descriptor)


def test_a_folder_of_the_users_own(tmp_path: Path) -> None:
    assert user_files.user_folder(tmp_path) == tmp_path.resolve()
    made = user_files.user_folder(tmp_path / "a" / "b", make=True)
    assert made.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(made)
    assert user_files.user_folder(tmp_path / "link") == made


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757, 0o775])
def test_a_folder_that_others_can_write_to(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_files, "_only_group_is_the_users", lambda status: False)
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    (tmp_path / "link").symlink_to(folder)
    for given in (folder, tmp_path / "link"):
        with pytest.raises(InputError, match=rf"{folder} can be written by others \(mode {mode:o}\).*chmod go-w"):
            user_files.user_folder(given)


def test_a_folder_below_one_that_others_can_write_to(tmp_path: Path) -> None:
    above = tmp_path / "shared"
    (above / "mine").mkdir(parents=True)
    above.chmod(0o777)
    with pytest.raises(InputError, match=f"{above} can be written by others"):
        user_files.user_folder(above / "mine")
    with pytest.raises(InputError, match=f"{above} can be written by others"):
        user_files.user_folder(above / "not there yet", make=True)
    above.chmod(0o1777)
    assert user_files.user_folder(above / "mine") == (above / "mine").resolve()


def test_what_is_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert _open(tmp_path / "file")
    assert not _open(tmp_path)
    (tmp_path / "file").chmod(0o666)
    assert not _open(tmp_path / "file")
    (tmp_path / "file").chmod(0o600)
    user = os.geteuid()
    if user == 0:
        os.chown(tmp_path, 1234, -1)
        os.chown(tmp_path / "file", 1234, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert not _open(tmp_path / "file")
    with pytest.raises(InputError, match="belongs to user"):
        user_files.user_folder(tmp_path)


def test_a_group_of_its_own_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    user = pwd.getpwuid(os.geteuid())
    tmp_path.chmod(0o775)
    os.chown(tmp_path, -1, user.pw_gid)
    for members, name, alone in (([], user.pw_name, True), (["eve"], user.pw_name, False), ([], "staff", False)):
        group = grp.struct_group((name, "x", user.pw_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda number, group=group: group)
        assert user_files._only_group_is_the_users(tmp_path.stat()) is alone


def test_a_session_refuses_a_graph_cache_that_others_can_write_to(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match="must be writable by you only"):
        Session.from_model(model, ExportableCache.from_model(model, 32), compile=True, graph_cache=tmp_path)


class Evil:
    """A pickle that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def _step(tokens: torch.Tensor) -> torch.Tensor:
    return tokens


def test_a_graph_writes_machine_code_to_inductors_folder_only(tmp_path: Path) -> None:
    """And over no file that is there."""
    names = ["../out.so", "/out.so", "ab/../../out.so", "ab/x.py", "ab/there.so", "ab/new.main.so"]
    (tmp_path / "code" / "ab").mkdir(parents=True)
    (tmp_path / "code" / "ab" / "there.so").write_text("there")
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name in ["graph", *names]:
            archive.writestr(name, "planted")
    assert unpacked(written.getvalue(), tmp_path / "code") == (b"planted", False)
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert found == {"code/ab/there.so": "there", "code/ab/new.main.so": "planted"}


def test_inductors_own_folder_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code that is there already is taken as it is."""
    model = tiny_model("llama")
    cache = GraphCache(tmp_path / "graphs", model, ExportableCache.from_model(model, 32))
    code = tmp_path / "torchinductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(code))
    code.mkdir()
    code.chmod(0o777)
    with pytest.raises(InputError, match=f"{code} must be writable by you only"):
        cache.get("step", _step, {}, [torch.tensor([1])])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own cache folder, new."""
    folder = tmp_path / "home"
    monkeypatch.setenv(user_files.HOME_VARIABLE, str(folder))
    return folder


def test_a_planted_graph_is_not_read(tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the same file, were it written with the user's key in a folder of the user's own, would run its code: the
    checks are what stops it.
    """
    model = tiny_model("llama")
    folder = tmp_path / "graphs"
    folder.mkdir()
    cache = GraphCache(folder, model, ExportableCache.from_model(model, 32))
    path, made = folder / "x.graph", tmp_path / "made"
    planted = packed(pickle.dumps(Evil(made)), (), tmp_path, plainly=False)

    def read(key: bytes, name: str = path.name, mode: int = 0o600, folder_mode: int = 0o700) -> str:
        caplog.clear()
        path.write_bytes(user_files.sealed(planted, key, name))
        path.chmod(mode)
        folder.chmod(folder_mode)
        with caplog.at_level(logging.INFO):
            assert cache._load(path, _step, {}, []) is None
        return caplog.text

    ours = user_key()
    for stranger in (b"", bytes(32), os.urandom(32), ours[:-1]):
        assert "not written with this user's key" in read(stranger)
    # A digest without a key, as files had that earlier versions wrote.
    assert "not written with this user's key" in _read_as_it_is(
        cache, path, hashlib.sha256(planted).digest() + planted, caplog
    )
    # What was written for another place.
    assert "not written with this user's key" in read(ours, name="y.graph")
    assert "is ignored" in read(ours, mode=0o666)
    assert "can be written by others" in read(ours, folder_mode=0o777)
    assert not made.exists()
    read(ours)
    assert made.exists()


def _read_as_it_is(cache: GraphCache, path: Path, written: bytes, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    path.write_bytes(written)
    with caplog.at_level(logging.INFO):
        assert cache._load(path, _step, {}, []) is None
    return caplog.text


def test_a_byte_of_a_sealed_file() -> None:
    whole = user_files.sealed(b"content", bytes(32), "name")
    assert user_files.unsealed(whole, bytes(32), "name") == b"content"
    for index in range(len(whole)):
        changed = bytearray(whole)
        changed[index] ^= 1
        with pytest.raises(ValueError, match="damaged, or not written"):
            user_files.unsealed(bytes(changed), bytes(32), "name")
    for short in (b"", whole[:16], whole[:32]):
        with pytest.raises(ValueError, match="damaged, or not written"):
            user_files.unsealed(short, bytes(32), "name")


# -- the key ---------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_for_the_user_alone(home: Path) -> None:
    key = user_key()
    assert len(key) == 32 and len(set(key)) > 10
    assert user_key() == key
    assert [path.name for path in home.iterdir()] == ["key"]
    assert home.stat().st_mode & 0o777 == 0o700 and (home / "key").stat().st_mode & 0o777 == 0o600
    (home / "key").unlink()
    assert user_key() != key


@pytest.mark.parametrize("links", [True, False])
def test_the_first_of_two_keys_counts(home: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes that find none."""
    link = os.link

    def late(source: str, path: Path) -> None:
        if links:
            path.write_bytes(bytes(range(32)))
            path.chmod(0o600)
            link(source, path)
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", late)
    key = user_key()
    assert (key == bytes(range(32))) is links
    assert [path.name for path in home.iterdir()] == ["key"]


def test_a_key_that_is_none_is_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_key()
    path = home / "key"
    for mode in (0o644, 0o640, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(InputError, match=f"{path} must be readable by you only; remove it"):
            user_key()
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(InputError, match="must have 32 bytes, got 5; remove it"):
        user_key()
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="cannot be read or created.*set EXPORTABLE_CACHE_HOME"):
        user_key()
    (tmp_path / "file").touch()
    monkeypatch.setenv(user_files.HOME_VARIABLE, str(tmp_path / "file" / "home"))
    model = tiny_model("llama")
    with pytest.raises(InputError, match=f"cannot be read or created.*set {user_files.HOME_VARIABLE}"):
        GraphCache(tmp_path / "graphs", model, ExportableCache.from_model(model, 32))


def test_somebody_elses_key_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_key()
    user = os.geteuid()
    if user == 0:
        os.chown(home / "key", 1234, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(InputError, match="must be readable by you only"):
        user_key()
