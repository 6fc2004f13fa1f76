"""What a control group leaves, in the layouts of both versions, for containers and for services."""

import os
from pathlib import Path

import pytest

from prolepsis.model import memory

MIB = 1 << 20
UNLIMITED_1 = 9223372036854771712  # as version 1 writes it


def group(directory: Path, limit: object, used: int, cache: int, *, version: int = 2, shared: int = 0) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (directory / name).write_text(f"{value}\n")
    stat = f"anon 1\nfile {cache}\n" if version == 2 else f"cache 1\nrss 1\ntotal_cache {cache}\n"
    if shared:
        stat += f"shmem {shared}\n" if version == 2 else f"shmem 1\ntotal_shmem {shared}\n"
    (directory / "memory.stat").write_text(stat)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the control groups; the machine itself has plenty."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(memory, "_free_on_machine", lambda: 1 << 40)
    return tmp_path


def test_a_container_sees_its_own_group_as_the_root(root: Path) -> None:
    (root / "membership").write_text("0::/\n")
    group(root, 2048 * MIB, 500 * MIB, 100 * MIB)
    assert memory.free_memory() == 1648 * MIB


def test_the_tightest_group_above_a_service_counts(root: Path) -> None:
    (root / "membership").write_text("0::/system.slice/prolepsis.service\n")
    group(root / "system.slice" / "prolepsis.service", 4096 * MIB, 100 * MIB, 0)
    assert memory.free_memory() == 3996 * MIB
    group(root / "system.slice", 3000 * MIB, 200 * MIB, 100 * MIB)
    assert memory.free_memory() == 2900 * MIB
    group(root / "system.slice" / "prolepsis.service", "max", 100 * MIB, 0)
    assert memory.free_memory() == 2900 * MIB


def test_version_1_limits_too(root: Path) -> None:
    (root / "membership").write_text("9:name=systemd:/\n4:cpu,memory:/docker/a:b\n0::/\n")
    group(root / "memory", UNLIMITED_1, 900 * MIB, 0, version=1)
    assert memory.free_memory() == 1 << 40
    group(root / "memory" / "docker" / "a:b", 1024 * MIB, 300 * MIB, 24 * MIB, version=1)
    assert memory.free_memory() == 748 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_files_in_memory_are_not_free(root: Path, version: int) -> None:
    (root / "membership").write_text("4:memory:/\n" if version == 1 else "0::/\n")
    directory = root / "memory" if version == 1 else root
    group(directory, 1024 * MIB, 800 * MIB, 500 * MIB, version=version, shared=300 * MIB)
    assert memory.free_memory() == 424 * MIB


@pytest.mark.parametrize("name", [b"a\x0bb", "a\u2028b".encode(), b"\xe4", b"a\rb"])
def test_groups_may_have_any_name(root: Path, name: bytes) -> None:
    (root / "membership").write_bytes(b"0::/" + name + b"\n")
    group(root / os.fsdecode(name), 1024 * MIB, 24 * MIB, 0)
    assert memory.free_memory() == 1000 * MIB


def test_nothing_left_is_no_debt(root: Path) -> None:
    (root / "membership").write_text("0::/\n")
    group(root, 100 * MIB, 120 * MIB, 10 * MIB)
    assert memory.free_memory() == 0


@pytest.mark.parametrize("membership", [None, "0::/\n", "0::/elsewhere/../..\n"])
def test_what_is_not_told_does_not_limit(root: Path, membership: str | None) -> None:
    if membership is not None:
        (root / "membership").write_text(membership)
    assert memory.free_memory() == 1 << 40
