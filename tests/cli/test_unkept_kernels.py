"""Where compiled kernels cannot be kept, users are told why each start takes so long, or why there is none."""

from pathlib import Path

import pytest
from command import assert_refused, run
from numba import config

from prolepsis import LLM
from prolepsis.cli import console


def test_a_directory_of_another_user_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    monkeypatch.setenv("NUMBA_CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")  # not beside the sources either
    assert_refused(run("serve", "--help"), "PROLEPSIS_CACHE")


@pytest.mark.parametrize("kept", [True, False])
def test_only_what_is_kept_is_compiled_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("PROLEPSIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / ("cache" if kept else "temporary") / "kernels" / "0"))
    monkeypatch.setattr(LLM, "needs_compiling", True)
    monkeypatch.setattr(console, "warm_up", lambda llm: None)
    said: list[str] = []
    console.load(str(tiny), say=said.append)
    assert said[-1].startswith("compiling the kernels")
    assert ("once" in said[-1]) is kept
    assert any(f"{tmp_path / 'cache'} cannot be written" in line for line in said) is not kept
