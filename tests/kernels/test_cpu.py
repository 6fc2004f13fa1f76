"""CPU features: Numba's overrides are followed, so that a lesser CPU can be forced."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import prolepsis.kernels
from prolepsis.kernels import cpu


@pytest.mark.parametrize(
    ("name", "listed", "expected"),
    [
        (None, "+avx2,-avx512f,+fma", {"avx2", "fma"}),
        ("haswell", "+avx2", {"avx2"}),
        (None, "", set()),
        ("generic", None, set()),
    ],
)
def test_overrides(monkeypatch: pytest.MonkeyPatch, name: str | None, listed: str | None, expected: set[str]) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", name)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", listed)
    assert cpu.features.__wrapped__() == expected


def test_the_host_is_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", None)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)
    monkeypatch.setattr(numba.config, "ENABLE_AVX", 0)
    assert not any(feature.startswith("avx") for feature in cpu.features.__wrapped__())


def test_has_wants_all() -> None:
    assert cpu.has()
    assert not cpu.has("no such feature")


def test_kernels_compile_where_nothing_can_be_kept(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    code = (
        "import os, numba\n"
        "from prolepsis.kernels.sampling import draw\n"
        "import numpy as np\n"
        "assert draw(np.array([0.0, 1.0]), 1.0, np.zeros(1, np.int32), 0.5) == 1\n"
        "print(numba.config.CACHE_DIR)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"PROLEPSIS_CACHE": str(blocked)}
    outcome = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert not os.path.exists(outcome.stdout.strip())


def test_another_installation_of_the_same_kernels_is_known_to_compile_again(tmp_path):
    directories = set()
    for name in ("one", "other"):
        kernels = tmp_path / name / "prolepsis" / "kernels"
        shutil.copytree(Path(prolepsis.kernels.__file__).parent, kernels)
        kernels.with_name("__init__.py").touch()
        code = "import numba, prolepsis.kernels as k; print(numba.config.CACHE_DIR, k.compiled_before())"
        environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {
            "PROLEPSIS_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": str(tmp_path / name),
        }
        outcome = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        directory, compiled = outcome.stdout.split()
        assert compiled == "False"
        Path(directory, "forward.run_pass-1.nbi").touch()
        directories.add(directory)
    assert len(directories) == 2
