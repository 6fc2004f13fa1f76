"""`calibrate` as a user runs it."""

from pathlib import Path

import pytest
from command import assert_refused, call, json_of


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
    assert_refused(call("kv", "verify", session), "needs the profile", "--profile")
    assert_refused(call("kv", "verify", session, "--profile", profile), "pass that with --model")
    loaded = json_of(call("kv", "load", session, "--model", tiny, "--profile", profile, "--json", "--max-tokens", "3"))
    assert loaded["restored_tokens"] == saved["tokens"]
    other = ["kv", "save", text, "-o", session, "--model", tiny, "--profile", profile, "--predictor", "static"]
    assert_refused(call(*other), "is for linear/1, and --predictor asks for static")


def test_a_kept_profile_needs_no_name(text: Path, tiny: Path, tmp_path: Path, profiles: Path) -> None:
    session = tmp_path / "s.pkv"
    saving = ["kv", "save", text, "-o", session, "--model", tiny, "--json"]
    command = f"prolepsis calibrate {tiny} --predictor linear --text FILE"
    assert_refused(call(*saving, "--predictor", "linear"), "--predictor linear", f"`{command}`")
    assert_refused(call(*saving, "--predictor", "twin"), "--predictor 'twin' is not known")
    assert not session.exists()
    assert json_of(call(*saving))["predictor"] == "static/1"
    calibrated = json_of(call("calibrate", tiny, "--text", text, "--json"))
    assert profiles in Path(calibrated["file"]).parents
    for kind, predictor in (([], "linear/1"), (["static"], "static/1"), (["linear"], "linear/1")):
        assert json_of(call(*saving, *(["--predictor"] * len(kind)), *kind))["predictor"] == predictor
    assert json_of(call("kv", "load", session, "--model", tiny, "--json", "--max-tokens", "3"))["restored_tokens"] > 0
    assert json_of(call("kv", "verify", session, "--against", tiny, "--json"))["equal_to_recomputed"] is True
    assert call("kv", "verify", session, "--model", tiny).code == 0
    assert json_of(call("kv", "verify", "-", "--model", tiny, "--json", stdin=session.read_bytes()))["sound"] is True
    assert_refused(call("kv", "verify", session), "pass it with --model")


def test_a_chat_is_kept_with_the_best_kept_profile(text: Path, tiny: Path, tmp_path: Path, profiles: Path) -> None:
    session, chatting = tmp_path / "chat.pkv", ["chat", tiny, "--max-tokens", "3", "--seed", "1", "--session"]
    assert call(*chatting, session, stdin=b"One\n").code == 0
    assert json_of(call("kv", "inspect", session, "--json"))["predictor"] == "static/1"
    json_of(call("calibrate", tiny, "--text", text, "--json"))
    for question in (b"Two\n", b"Three\n"):
        resumed = call(*chatting, session, stdin=question)
        assert resumed.code == 0, resumed.err
        assert "resumed" in resumed.err
    assert json_of(call("kv", "inspect", session, "--json"))["predictor"] == "linear/1"
    (kept,) = profiles.rglob("*.safetensors")
    kept.unlink()
    assert_refused(call(*chatting, session, stdin=b"Four\n"), "needs the profile", str(profiles))


def test_where_nothing_can_be_kept(text: Path, tiny: Path, tmp_path: Path, profiles: Path) -> None:
    profiles.write_text("in the way")
    assert_refused(call("calibrate", tiny, "--text", text), "cannot be kept in", "-o")
    done = call("kv", "save", text, "-o", tmp_path / "s.pkv", "--model", tiny)
    assert done.code == 0
    assert done.err.count("cannot be read") == 1


def test_a_table_is_printed(text: Path, tiny: Path, tmp_path: Path) -> None:
    done = call("calibrate", tiny, "--text", text, "-o", tmp_path / "p", "--predictor", "static", "--kv-dtype", "int8")
    assert done.code == 0, done.err
    assert "static/1 for int8" in done.out
    assert "held out of the fit" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--predictor", "twin"], "--predictor 'twin' is not known; choose one of marginal, static, linear"),
        (["--kv-dtype", "fp64"], "'fp64' is not supported; choose one of bf16, fp16, fp8_e4m3"),
        (["--bits", "4"], "--bits is for --predictor twin-mixed, not linear"),
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
    assert "empty.txt: 0 tokens are too few to calibrate on" in done.err
