"""A session file is saved whole or not at all, whatever happens on the way."""

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
from prolepsis.store import open_session, replace_file

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
