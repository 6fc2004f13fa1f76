"""A disk tier whose files are damaged, removed or foreign; full disks; two processes; permissions."""

import errno
import os
import resource
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tier_samples import fast_directory, forked, key

from prolepsis.errors import InputError, TierDamagedError, TierError, TierFullError
from prolepsis.store import DiskTier, Tiers, disk_tier
from prolepsis.store.disk_index import cost_of
from prolepsis.store.frame import LARGEST_FRAME
from prolepsis.store.tier import path_of

BUDGET = 1 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    with fast_directory() as place:
        yield place


@pytest.fixture
def tier(directory: Path) -> Iterator[DiskTier]:
    """A tier of three entries."""
    tier = DiskTier(directory, BUDGET)
    for number in range(3):
        tier.put(key(number), bytes([number]) * 100)
    yield tier
    tier.close()


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, 60)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def lengthened(file: Path) -> None:
    os.truncate(file, 1000)


def huge(file: Path) -> None:
    os.truncate(file, LARGEST_FRAME + 1)


def removed(file: Path) -> None:
    file.unlink()


def swapped(file: Path) -> None:
    file.write_bytes((file.parents[2] / path_of(key(2))).read_bytes())


DAMAGES = [flipped, cut, emptied, lengthened, huge, removed, swapped]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_and_what_is_damaged_deleted(damage: Callable, tier: DiskTier, directory: Path) -> None:
    damage(directory / path_of(key(1)))
    with pytest.raises(TierDamagedError):
        tier.get(key(1))
    assert tier.get(key(1)) is None
    assert tier.size(key(1)) is None
    assert tier.usage().entries == 2
    assert not (directory / path_of(key(1))).exists()
    tier.put(key(1), b"again")
    assert tier.get(key(1)) == b"again"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_while_no_one_looks_is_never_returned(damage: Callable, directory: Path, tier: DiskTier) -> None:
    tier.close()
    damage(directory / path_of(key(1)))
    tiers = Tiers([DiskTier(directory, BUDGET)])
    assert tiers.get(key(1)) is None
    assert tiers.get(key(2)).data == bytes([2]) * 100  # type: ignore[union-attr]
    assert tiers.statistics()[0].entries == 2
    tiers.close()


def lost(index: Path) -> None:
    index.unlink()


def garbage(index: Path) -> None:
    index.write_bytes(b"no database" * 1000)


def of_another_version(index: Path) -> None:
    database = sqlite3.connect(index)
    database.execute("PRAGMA user_version = 99")
    database.close()


def torn(index: Path) -> None:
    data = bytearray(index.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    index.write_bytes(data)


@pytest.mark.parametrize("damage", [lost, garbage, of_another_version, torn])
def test_an_index_is_made_again_from_the_files(damage: Callable, directory: Path, tier: DiskTier) -> None:
    tier.close()
    damage(directory / "index.sqlite")
    again = DiskTier(directory, BUDGET)
    assert sorted(again.keys()) == [key(number) for number in range(3)]
    assert again.get(key(2)) == bytes([2]) * 100
    assert again.usage().bytes == 3 * cost_of(100)
    again.close()


def test_files_of_others_are_left_alone(directory: Path, tier: DiskTier) -> None:
    tier.close()
    mine = [directory / "notes.txt", directory / "segment" / "00" / "notes.txt", directory / "Other" / "x" / key(5)]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    DiskTier(directory, 4096).close()
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other things"):
        DiskTier(tmp_path, BUDGET)
    with pytest.raises(InputError, match=r"notes\.txt cannot be used"):
        DiskTier(tmp_path / "notes.txt", BUDGET)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_second_process_is_refused_by_name(directory: Path, tier: DiskTier) -> None:
    def work(write: int) -> None:
        try:
            DiskTier(directory, BUDGET)
        except InputError as error:
            os.write(write, str(error).encode())

    with forked(work) as (child, read):
        said = os.read(read, 1000).decode()
        os.waitpid(child, 0)
    assert f"{directory} is in use by another process" in said
    assert tier.get(key(1)) == bytes([1]) * 100
    tier.close()
    DiskTier(directory, BUDGET).close()


def test_no_one_else_may_read(directory: Path, tier: DiskTier) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [directory, *directory.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_lower_budget_is_kept_at_once_but_for_pins(directory: Path, tier: DiskTier) -> None:
    tier.pin(key(0))
    tier.get(key(1))
    tier.close()
    again = DiskTier(directory, 2 * cost_of(100))
    assert sorted(again.keys()) == [key(0), key(1)]
    again.close()
    again = DiskTier(directory, 1000)
    assert list(again.keys()) == [key(0)]
    with pytest.raises(TierFullError):
        again.put(key(5), b"")
    again.close()


class FullDisk:
    """Has no room for the first `times` files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left, self.write = times, disk_tier._write
        monkeypatch.setattr(disk_tier, "_write", self)

    def __call__(self, path: Path, header: bytes, data: bytes) -> None:
        self.left -= 1
        if self.left >= 0:
            path.write_bytes(header)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write(path, header, data)


def unfinished(directory: Path) -> list[Path]:
    return list(directory.rglob("*.part"))


def test_older_entries_make_way_on_a_full_disk(
    directory: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch, 1)
    tier.put(key(5), bytes(100))
    assert sorted(tier.keys()) == [key(2), key(5)]
    assert not unfinished(directory)


def test_a_disk_that_stays_full_is_told(directory: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.pin(key(0))
    FullDisk(monkeypatch, 1000)
    with pytest.raises(TierFullError, match="No space left"):
        tier.put(key(5), bytes(100))
    assert tier.get(key(0)) == bytes(100)
    assert tier.get(key(5)) is None
    assert not unfinished(directory)


def test_a_file_that_cannot_be_written_whole_is_none(directory: Path, tier: DiskTier) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
    try:
        with pytest.raises(TierError, match="File too large"):
            tier.put(key(5), bytes(1 << 18))
        tier.put(key(6), bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tier.get(key(5)) is None
    assert tier.get(key(6)) == bytes(1000)
    assert not unfinished(directory)


@pytest.mark.parametrize("method", ["add", "_write_touched"])
def test_an_index_that_fails_keeps_nothing_half(
    method: str, directory: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(f"prolepsis.store.disk_index.DiskIndex.{method}", fail)
        with pytest.raises(TierError, match="disk I/O error"):
            tier.put(key(5), b"abc")
    assert tier.get(key(5)) is None
    assert tier.usage().entries == 3
    assert not (directory / path_of(key(5))).exists()
    tier.put(key(5), b"abc")
    assert tier.get(key(5)) == b"abc"


def test_eight_threads_at_once(directory: Path) -> None:
    tier = DiskTier(directory, 20 * 4096)
    problems: list[object] = []

    def work(seed: int) -> None:
        try:
            for step in range(100):
                name = key((seed * 7 + step * 13) % 30)
                if step % 3 == 0:
                    tier.put(name, name.encode() * (1 + step % 5))
                elif step % 10 == 1:
                    tier.delete(name)
                elif (data := tier.get(name)) and data != name.encode() * (len(data) // len(name)):
                    problems.append(name)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    usage = tier.usage()
    files = [path for path in directory.rglob("segment-*") if path.is_file()]
    assert usage.entries == len(files) == len(list(tier.keys()))
    assert usage.bytes == sum(cost_of(path.stat().st_size - 20) for path in files)
    assert usage.bytes <= 20 * 4096
    tier.close()
