"""A disk tier whose process dies: at every line of its code, and by kill -9 in the midst of its work."""

import hashlib
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tier_samples import fast_directory, forked, key, killed

from prolepsis.store import DiskTier, disk_index, disk_recovery, disk_tier
from prolepsis.store.disk_index import cost_of

BUDGET = 40_960  # ten blocks
Step = Callable[[DiskTier], object]
DEAD = 9


def data_of(name: str, version: int = 0) -> bytes:
    """What is put under a key: known to whoever knows the key, and of a length of its own."""
    seed = hashlib.blake2b(f"{name} {version}".encode()).digest()
    return (seed * 150)[: seed[0] * 32 + version]


@pytest.fixture
def directory() -> Iterator[Path]:
    with fast_directory() as place:
        yield place


def contents(directory: Path) -> dict[str, bytes]:
    """What a directory holds, opened anew; everything about it must agree, and nothing else lie there."""
    tier = DiskTier(directory, BUDGET)
    usage = tier.usage()
    names = list(tier.keys())
    held = {name: data for name in names if (data := tier.get(name)) is not None}
    assert set(held) == set(names)
    assert usage.entries == len(held)
    assert usage.bytes == sum(cost_of(len(data)) for data in held.values())
    assert usage.bytes <= BUDGET
    tier.close()
    files = {path.name for path in directory.rglob("*") if path.is_file() and path.parent != directory}
    assert files == set(held)
    return held


def die_after(lines: int) -> None:
    """End this process when so many lines of the tier's code have run."""
    code = {module.__file__ for module in (disk_tier, disk_index, disk_recovery)}
    left = lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in code:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os._exit(DEAD)
        return trace

    sys.settrace(trace)


STEPS: dict[str, Step] = {
    "put": lambda tier: tier.put(key(7), data_of(key(7))),
    "replace": lambda tier: tier.put(key(1), data_of(key(1), 1)),
    "replace the pinned": lambda tier: tier.put(key(0), data_of(key(0), 1)),
    "evict": lambda tier: tier.put(key(8), bytes(30_000)),
    "delete": lambda tier: tier.delete(key(1)),
    "pin": lambda tier: tier.pin(key(1)),
    "unpin": lambda tier: tier.unpin(key(0)),
    "open and close": lambda tier: tier.usage(),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_dies_at_some_line_leaves_a_sound_store(step: str, directory: Path) -> None:
    die_at_every(41, step, directory)


@pytest.mark.nightly
@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_dies_at_any_line_leaves_a_sound_store(step: str, directory: Path) -> None:
    die_at_every(1, step, directory)


def die_at_every(stride: int, step: str, directory: Path) -> None:
    """Do a step in processes that die after 0, `stride`, 2 `stride` ... lines, until one comes to its end."""
    tier = DiskTier(directory, BUDGET)
    for number in range(3):
        tier.put(key(number), data_of(key(number)))
    tier.pin(key(0))
    tier.close()
    before = contents(directory)
    after = contents_after(STEPS[step], directory)
    lines = 0
    while True:
        place = directory.with_name(f"{step}-{lines}")
        shutil.copytree(directory, place)
        (place / "segment" / "00" / f"{key(0)}.0123.part").write_bytes(b"left by a process that died before")
        if not dies(lines, STEPS[step], place):
            assert contents(place) == after
            break
        held = contents(place)
        for name in before | after:
            assert held.get(name) in (before.get(name), after.get(name)), (name, lines)
        assert key(0) in held
        shutil.rmtree(place)
        lines += stride
    assert lines > 50


def contents_after(step: Step, directory: Path) -> dict[str, bytes]:
    place = directory.with_name("whole")
    shutil.copytree(directory, place)
    tier = DiskTier(place, BUDGET)
    step(tier)
    tier.close()
    return contents(place)


def dies(lines: int, step: Step, directory: Path) -> bool:
    """Whether a process that opens a tier, does a step and closes it dies by then."""

    def work(_: int) -> None:
        die_after(lines)
        tier = DiskTier(directory, BUDGET)
        step(tier)
        tier.close()

    with forked(work) as (child, _):
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, DEAD)
    return code == DEAD


def work_for_ever(directory: Path, seed: int, write: int) -> None:
    """Put, replace, delete, pin and evict; every pin is told when it is done."""
    random_numbers = random.Random(seed)
    tier = DiskTier(directory, BUDGET)
    while True:
        name = key(random_numbers.randrange(2, 60))
        tier.put(name, data_of(name, random_numbers.randrange(3)))
        if random_numbers.random() < 0.2:
            tier.delete(key(random_numbers.randrange(2, 60)))
        pinned = key(random_numbers.randrange(2))
        tier.put(pinned, data_of(pinned))
        tier.pin(pinned)
        os.write(write, bytes([int(pinned[-1])]))


def kill_at_random(directory: Path, times: int) -> None:
    random_numbers = random.Random(times)
    pinned: set[str] = set()
    for seed in range(times):
        with forked(lambda write, seed=seed: work_for_ever(directory, seed, write)) as (child, read):
            told = b"".join(os.read(read, 1) for _ in range(random_numbers.randrange(1, 40)))
            killed(child)
        pinned |= {key(number) for number in told}
        held = contents(directory)
        assert pinned <= set(held)
        for name, data in held.items():
            assert data in [data_of(name, version) for version in range(3)]


def test_kill_in_the_midst_of_work(directory: Path) -> None:
    kill_at_random(directory, 15)


@pytest.mark.nightly
def test_kill_in_the_midst_of_work_many_times(directory: Path, tmp_path: Path) -> None:
    kill_at_random(directory, 500)
    kill_at_random(tmp_path / "store", 25)  # on a real disk
