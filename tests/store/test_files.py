"""The lock of a file."""

from pathlib import Path

import pytest

from prolepsis.store import BusyError, lock_file


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as first, path.open("ab") as second:
        lock_file(first, path)
        with pytest.raises(BusyError):
            lock_file(second, path)
    with path.open("ab") as third:
        lock_file(third, path)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_of_a_file_that_is_gone_is_none(replaced: bool, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as file:
        path.unlink()
        if replaced:
            path.touch()
        with pytest.raises(BusyError):
            lock_file(file, path)
