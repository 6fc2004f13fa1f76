"""`calibrate` as a user runs it."""

from pathlib import Path

import pytest
from command import call, json_of


@pytest.fixture(scope="module")
def profile(text: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "tiny.profile"
    report = json_of(call("calibrate", tiny, "--text", text, "--text", text, "-o", path, "--check", text, "--json"))
    assert report["predictor"] == "linear/1"
    assert report["file_bytes"] == path.stat().st_size
    assert [row["text"] for row in report["rates"]] == ["held out of the fit", str(text)]
    assert all(row["ratio"] > row["uncalibrated_ratio"] > 1 for row in report["rates"])
    return path


def test_a_session_with_a_profile(profile: Path, text: Path, tiny: Path, tmp_path: Path) -> None:
    session = tmp_path / "s.pkv"
    plain = json_of(call("kv", "save", text, "-o", tmp_path / "plain.pkv", "--model", tiny, "--json"))
    saved = json_of(call("kv", "save", text, "-o", session, "--model", tiny, "--profile", profile, "--json"))
    assert saved["predictor"] == "linear/1"
    assert saved["ratio"] > plain["ratio"]
    verified = call("kv", "verify", session, "--profile", profile, "--against", tiny)
    assert verified.code == 0, verified.err
    refused = call("kv", "verify", session)
    assert refused.code == 2
    assert "--profile" in refused.err
    loaded = json_of(call("kv", "load", session, "--model", tiny, "--profile", profile, "--json", "--max-tokens", "3"))
    assert loaded["restored_tokens"] == saved["tokens"]


def test_a_table_is_printed(text: Path, tiny: Path, tmp_path: Path) -> None:
    done = call("calibrate", tiny, "--text", text, "-o", tmp_path / "p", "--predictor", "static", "--kv-dtype", "int8")
    assert done.code == 0, done.err
    assert "static/1 for int8" in done.out
    assert "held out of the fit" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--predictor", "twin"], "--predictor 'twin' is not known; choose one of marginal, static, linear"),
        (["--kv-dtype", "fp64"], "--kv-dtype 'fp64' is not known"),
        (["--tokens", "3"], "--tokens must be at least 256"),
        (["--window", "0"], "--window must be at least 1"),
        (["--check", "nowhere.txt"], "--check: cannot read nowhere.txt"),
        (["--check", "/dev/null"], "--check: /dev/null has no text"),
        (["-o", "-"], "-o: a profile is written to a file"),
        (["--text", "nowhere.txt"], "--text: cannot read nowhere.txt"),
        (["-o", "nowhere/p"], "there is no directory"),
    ],
)
def test_misuse(text: Path, tiny: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = call("calibrate", tiny, "--text", text, "-o", tmp_path / "p", *arguments)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "p").exists()


def test_an_empty_text(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    done = call("calibrate", tiny, "--text", tmp_path / "empty.txt", "-o", tmp_path / "p")
    assert done.code == 2
    assert "no tokens to calibrate on" in done.err
