"""CPU features: Numba's overrides are followed, so that a lesser CPU can be forced."""

import numba
import pytest

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
