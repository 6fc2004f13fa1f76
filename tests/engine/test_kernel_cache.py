"""Compiled kernels that nobody uses go; those of others, and whatever else lies there, stay."""

import os
import time
from pathlib import Path

import pytest
from numba import config

from prolepsis.engine.kernel_cache import UNUSED_S, mark_used, remove_unused

OWN, OTHER = "0" * 16, "f" * 16


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which everything is old."""
    monkeypatch.setenv("PROLEPSIS_CACHE", str(tmp_path))
    kernels = tmp_path / "kernels"
    monkeypatch.setattr(config, "CACHE_DIR", str(kernels / OWN))
    for name in (OWN, OTHER, "notes"):
        (kernels / name / "sub").mkdir(parents=True)
        (kernels / name / "sub" / "forward.nbi").write_bytes(b"x")
    for path in kernels.rglob("*"):
        _age(path)
    return kernels


def _age(path: Path) -> None:
    long_ago = time.time() - UNUSED_S - 1000
    os.utime(path, (long_ago, long_ago))


def _left(kernels: Path) -> set[str]:
    return {path.parts[-3] for path in kernels.rglob("*.nbi")}


def test_what_nobody_has_used_for_long_is_removed_but_its_directory_stays(kernels: Path) -> None:
    remove_unused()
    assert _left(kernels) == {OWN, "notes"}
    assert (kernels / OTHER / "sub").is_dir()
    remove_unused()


def test_what_another_process_uses_or_compiles_is_kept(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(config, "CACHE_DIR", str(kernels / OTHER))
        mark_used()
    remove_unused()
    assert _left(kernels) == {OWN, OTHER, "notes"}
    _age(kernels / OTHER)
    (kernels / OTHER / "sub" / "forward.nbi").write_bytes(b"y")
    remove_unused()
    assert _left(kernels) == {OWN, OTHER, "notes"}


def test_links_are_not_followed(kernels: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "sub").mkdir(parents=True)
    (elsewhere / "sub" / "forward.nbi").write_bytes(b"x")
    for path in (elsewhere / "sub" / "forward.nbi", elsewhere / "sub", elsewhere):
        _age(path)
    (kernels / ("a" * 16)).symlink_to(elsewhere)
    (kernels / OTHER / "linked").symlink_to(elsewhere)
    (kernels / OTHER / "linked.nbi").symlink_to(elsewhere / "sub" / "forward.nbi")
    _age(kernels / OTHER)
    remove_unused()
    assert (elsewhere / "sub" / "forward.nbi").exists()
    assert not (kernels / OTHER / "sub" / "forward.nbi").exists()


def test_a_place_that_is_not_ours_is_left_alone(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROLEPSIS_CACHE", str(tmp_path / "elsewhere"))
    remove_unused()
    assert _left(kernels) == {OWN, OTHER, "notes"}
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "gone"))
    mark_used()
