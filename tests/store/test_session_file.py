"""A session file is replaced whole or not at all, or added to with all it held intact, whatever happens on the way."""

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prolepsis.coding import encode
from prolepsis.errors import InputError, SegmentError
from prolepsis.store import append_session, open_session, replace_file

OLD, NEW = b"old" * 1000, b"new" * 2000


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "chat.pkv"
    path.write_bytes(OLD)
    return path


def save(path: Path, then: Callable[[], None]) -> None:
    """Save NEW, and do something before the end."""
    with replace_file(path) as file:
        file.write(NEW)
        then()


def unfinished(directory: Path) -> list[Path]:
    return [p for p in directory.iterdir() if p.suffix == ".part"]


def test_the_new_file_takes_the_place_of_the_old(target: Path) -> None:
    with replace_file(target) as file:
        file.write(NEW)
        assert target.read_bytes() == OLD
    assert target.read_bytes() == NEW
    assert unfinished(target.parent) == []


def test_a_new_file_gets_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replace_file(tmp_path / "new.pkv") as file:
            file.write(NEW)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.pkv").stat().st_mode) == 0o640


def test_permissions_of_an_old_file_stay(target: Path) -> None:
    target.chmod(0o600)
    with replace_file(target) as file:
        file.write(NEW)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_link_stays_a_link(target: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.pkv"
    link.symlink_to(target)
    with replace_file(link) as file:
        file.write(NEW)
    assert link.is_symlink()
    assert target.read_bytes() == NEW


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_exception_leaves_the_old_file(target: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        save(target, fail)
    assert target.read_bytes() == OLD
    assert unfinished(target.parent) == []


FULL = """
import resource, signal, sys
from prolepsis.errors import InputError
from prolepsis.store import replace_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with replace_file(sys.argv[1]) as file:
        for _ in range(1000):
            file.write(bytes(1000))
except InputError as error:
    print(error)
"""


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A child that runs `code` with the same imports as this process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_no_room_leaves_the_old_file(target: Path) -> None:
    """A limit on the size of files stands for the full disk: writing fails in the middle."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    child = python(FULL, str(target))
    output, _ = child.communicate(timeout=60)
    assert "chat.pkv cannot be saved: File too large; an older file of that name is unchanged" in output
    assert target.read_bytes() == OLD
    assert unfinished(target.parent) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_called_that(target: Path) -> None:
    def fill() -> None:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(NEW)

    with pytest.raises(InputError, match="the disk is full; an older file"):
        save(target, fill)
    assert target.read_bytes() == OLD
    assert unfinished(target.parent) == []


KILLED = """
import sys, time
from prolepsis.store import replace_file
with replace_file(sys.argv[1]) as file:
    file.write(b"new" * 100_000)
    file.flush()
    print("halfway", flush=True)
    time.sleep(60)
"""


def test_a_killed_save_leaves_the_old_file_and_its_rest_is_removed_later(target: Path) -> None:
    child = python(KILLED, str(target))
    assert child.stdout is not None
    assert child.stdout.readline() == "halfway\n"
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    child.stdout.close()
    assert target.read_bytes() == OLD
    (rest,) = unfinished(target.parent)
    with replace_file(target) as file:
        file.write(NEW)
    assert rest.exists()  # it could be another process's save in progress
    os.utime(rest, (time.time() - 7200,) * 2)
    with replace_file(target) as file:
        file.write(NEW)
    assert unfinished(target.parent) == []


def test_targets_that_cannot_be_saved_to(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "missing" / "chat.pkv", "there is no directory"),
        (Path(os.devnull), "is not a regular file"),
        (tmp_path / ("x" * 300), "cannot be saved"),
    ):
        with pytest.raises(InputError, match=message), replace_file(path) as file:
            file.write(NEW)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_protected_targets_are_refused(target: Path) -> None:
    target.chmod(0o400)
    with pytest.raises(InputError, match="write-protected"), replace_file(target):
        pass
    target.chmod(0o600)
    target.parent.chmod(0o500)
    try:
        with pytest.raises(InputError, match="cannot be saved: Permission denied"), replace_file(target):
            pass
    finally:
        target.parent.chmod(0o700)


def test_sessions_are_opened_by_path(tmp_path: Path) -> None:
    kv = np.random.default_rng(0).normal(size=(1, 2, 20, 1, 16)).astype(np.float16)
    path = tmp_path / "chat.pkv"
    with replace_file(path) as file:
        file.write(encode(kv, metadata=b"{}"))
    with open_session(path) as session:
        assert np.array_equal(session.read_all(), kv.view(np.uint16))
        assert session.metadata == b"{}"
    with pytest.raises(InputError, match="does not exist"), open_session(tmp_path / "other.pkv"):
        pass
    with pytest.raises(InputError, match="cannot be read: Is a directory"), open_session(tmp_path):
        pass
    path.write_bytes(b"GGUF and more")
    with pytest.raises(SegmentError, match=r"chat\.pkv is not a Prolepsis session file"), open_session(path):
        pass


KV = np.random.default_rng(0).normal(size=(1, 2, 60, 1, 16)).astype(np.float16).view(np.uint16)


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """A file of the first 20 tokens of KV."""
    path = tmp_path / "chat.pkv"
    path.write_bytes(encode(KV[:, :, :20], dtype="fp16", token_ids=range(20), metadata=b"first"))
    return path


def add(path: Path, count: int = 20, then: Callable[[], None] = lambda: None) -> None:
    """Append tokens, and do something before the end."""
    with append_session(path) as (_, writer):
        first = writer.position
        writer.add(KV[:, :, first : first + count], range(first, first + count))
        then()
        writer.finish(b"more")


def assert_holds(path: Path, tokens: int, metadata: bytes) -> None:
    with open_session(path) as reader:
        assert np.array_equal(reader.read_all(), KV[:, :, :tokens])
        assert reader.metadata == metadata


def test_a_session_grows_in_place(session: Path) -> None:
    before, inode = session.read_bytes(), session.stat().st_ino
    for tokens in (40, 60):
        add(session)
        assert_holds(session, tokens, b"more")
    assert session.read_bytes().startswith(before)
    assert session.stat().st_ino == inode
    assert list(session.parent.iterdir()) == [session]


def test_as_long_as_nothing_is_added_the_file_stays(session: Path) -> None:
    session.write_bytes(session.read_bytes() + b"rest")
    before = session.stat()
    with append_session(session) as (reader, writer):
        assert (reader.stop, writer.position) == (20, 20)
    with pytest.raises(ValueError, match="on the way"), append_session(session):
        raise ValueError("on the way")
    assert session.stat() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
@pytest.mark.parametrize("rest", [b"", b"of a save that was broken off"])
def test_an_exception_leaves_the_earlier_session(session: Path, error: type[BaseException], rest: bytes) -> None:
    before = session.read_bytes()
    session.write_bytes(before + rest)

    def fail() -> None:
        raise error

    with pytest.raises(error):
        add(session, then=fail)
    assert session.read_bytes() == before


KILLED_WHILE_ADDING = """
import os, sys, time
import numpy as np
from prolepsis.store import append_session
with append_session(sys.argv[1]) as (_, writer):
    writer.add(np.zeros((1, 2, 20, 1, 16), np.uint16), range(20))
    print("halfway", flush=True)
    time.sleep(60)
"""


def test_a_killed_append_leaves_the_earlier_session(session: Path) -> None:
    before = session.read_bytes()
    child = python(KILLED_WHILE_ADDING, str(session))
    assert child.stdout is not None
    assert child.stdout.readline() == "halfway\n"
    with pytest.raises(InputError, match="another process is saving to it"):
        add(session)
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    child.stdout.close()
    assert len(session.read_bytes()) > len(before)
    assert session.read_bytes().startswith(before)
    with pytest.raises(SegmentError, match=r"a whole save \(tokens 0-19"), open_session(session):
        pass
    with open_session(session, salvage=True) as reader:
        assert np.array_equal(reader.read_all(), KV[:, :, :20])
        assert reader.metadata == b"first"
    add(session)
    assert_holds(session, 40, b"more")


FULL_WHILE_ADDING = """
import os, resource, signal, sys
import numpy as np
from prolepsis.errors import InputError
from prolepsis.store import append_session
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = os.path.getsize(sys.argv[1]) + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    with append_session(sys.argv[1]) as (_, writer):
        writer.add(np.random.default_rng(1).integers(0, 1 << 16, (1, 2, 200, 1, 16)).astype(np.uint16), range(200))
        writer.finish()
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize("room", [0, 10, 5000])
def test_no_room_to_add_leaves_the_earlier_session(session: Path, room: int) -> None:
    before = session.read_bytes()
    output, _ = python(FULL_WHILE_ADDING, str(session), str(room)).communicate(timeout=60)
    assert "chat.pkv cannot be saved: File too large" in output
    assert session.read_bytes() == before


def test_what_is_added_is_on_the_disk_before_the_trailer_is(session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda _: sizes.append(session.stat().st_size))
    add(session)
    with open_session(session) as reader:
        trailer = reader.segments[-1].offset + reader.segments[-1].payload_bytes
    assert sizes == [trailer, session.stat().st_size]


def test_sessions_that_cannot_be_added_to(session: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "other.pkv", "cannot be saved: No such file"),
        (Path(os.devnull), "is not a regular file"),
    ):
        with pytest.raises(InputError, match=message), append_session(path):
            pass
    session.write_bytes(b"GGUF and more")
    with pytest.raises(SegmentError, match=r"chat\.pkv is not a Prolepsis session file"), append_session(session):
        pass
