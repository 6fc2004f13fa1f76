"""Profiles in the cache directory: the newest of the best predictor codes, and each file finds its own again."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from test_conversation import kv
from test_profiles import TEXTS, calibrated

from prolepsis import LLM
from prolepsis.coding.profile_file import CalibratedProfile, to_bytes
from prolepsis.engine.profile_store import best_kept, keep, profile_of_session
from prolepsis.engine.profiles import load_profile
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import InputError, SegmentError
from prolepsis.store import open_session


@pytest.fixture(scope="module")
def linear(tiny_llm: LLM) -> list[CalibratedProfile]:
    """Two of one model."""
    return [calibrated(tiny_llm, tokens=tokens) for tokens in (300, 600)]


@pytest.fixture
def sequence(llm: LLM) -> Iterator[Sequence]:
    sequence = llm.runner.new_sequence(TEXTS[1][:300])
    llm.runner.prefill(sequence)
    yield sequence
    sequence.release()


def written_at(path: Path, second: int) -> Path:
    os.utime(path, (second, second))
    return path


def never(why: str) -> None:
    raise AssertionError(why)


@pytest.mark.usefixtures("profiles")
def test_the_newest_of_the_best_is_taken(llm: LLM, linear: list[CalibratedProfile]) -> None:
    assert best_kept(llm, "bf16", never) is None
    static = keep(calibrated(llm, "static", tokens=300))
    assert best_kept(llm, "bf16", never).path == static
    first, second = (written_at(keep(one), 1000 * k) for k, one in enumerate(linear, 1))
    assert best_kept(llm, "bf16", never).path == second
    assert best_kept(llm, "bf16", never, ["static"]).path == static
    assert best_kept(llm, "fp16", never) is None
    assert keep(linear[0]) == first  # calibrated to the same once more
    assert best_kept(llm, "bf16", never).path == first
    assert len(list(first.parent.iterdir())) == 3


@pytest.mark.usefixtures("profiles")
def test_a_session_finds_its_profile_when_there_is_a_newer_one(
    llm: LLM, linear: list[CalibratedProfile], sequence: Sequence, tmp_path: Path
) -> None:
    older, newer = linear
    keep(older)
    before, path = kv(llm, sequence), tmp_path / "s.pkv"
    save_session(path, llm, sequence, profile=older.profile)
    keep(newer)
    for given in (None, newer.profile):
        restored = load_session(path, llm, profile=given).sequence
        assert np.array_equal(kv(llm, restored), before)
        restored.release()
    with open_session(path) as reader:
        with pytest.raises(InputError, match="pass it with --model"):
            profile_of_session(reader.header, reader.name)
        reader.use(profile_of_session(reader.header, reader.name, llm))
        reader.verify()


def test_what_is_missing_is_named(
    llm: LLM, linear: list[CalibratedProfile], sequence: Sequence, tmp_path: Path, profiles: Path
) -> None:
    path, fingerprint = tmp_path / "s.pkv", linear[0].profile.fingerprint
    save_session(path, llm, sequence, profile=linear[0].profile)
    name = f"linear-bf16-{fingerprint}.safetensors"
    message = f"needs the profile {fingerprint} of the predictor 'linear/1'.* in {profiles}.*--profile.* as {name}"
    with pytest.raises(SegmentError, match=message):
        load_session(path, llm, recompute=True)
    kept = keep(linear[0])
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(SegmentError, match=r"nor kept in .* \(.*not a sound profile file"):
        load_session(path, llm)


@pytest.mark.usefixtures("profiles")
def test_a_header_leads_nowhere_else(
    llm: LLM, linear: list[CalibratedProfile], sequence: Sequence, tmp_path: Path
) -> None:
    """A file says what its profile is called; that is no way out of the directory."""
    outside = keep(linear[0]).parent.parent / f"linear-bf16-{linear[0].profile.fingerprint}.safetensors"
    outside.write_bytes(to_bytes(linear[0]))
    save_session(tmp_path / "s.pkv", llm, sequence, profile=linear[0].profile)
    with open_session(tmp_path / "s.pkv") as reader:
        header = reader.header
    for field, value in (("predictor", "../linear"), ("profile_fingerprint", f"/../{header.profile_fingerprint}")):
        spoilt = type(header)(**{name: getattr(header, name) for name in header.__struct_fields__} | {field: value})
        with pytest.raises(SegmentError, match="nor kept in"):
            profile_of_session(spoilt, "s.pkv", llm)


@pytest.mark.usefixtures("profiles")
def test_bad_files_are_left_out_with_a_word(llm: LLM, linear: list[CalibratedProfile]) -> None:
    good = written_at(keep(linear[0]), 1000)
    (good.parent / "linear-bf16-notes.txt").write_text("of no interest")
    (good.parent / f".{good.name}.1234.part").write_bytes(b"a save that was killed")
    assert best_kept(llm, "bf16", never).path == good
    bad = {"damaged": good.read_bytes()[:-5], "misnamed": good.read_bytes(), "foreign": b"hello"}
    for digit, data in enumerate(bad.values()):
        (good.parent / f"linear-bf16-{str(digit) * 32}.safetensors").write_bytes(data)
    other = CalibratedProfile(linear[1].profile, linear[1].geometry, linear[1].rope, {"name": "other"}, 1)
    (good.parent / keep(other).name).write_bytes(to_bytes(other))
    told: list[str] = []
    assert best_kept(llm, "bf16", told.append).path == good
    assert len(told) == 4
    assert sum("does not hold the profile that its name says" in why for why in told) == 1
    assert sum("calibrated for another model" in why for why in told) == 1


def test_a_place_that_cannot_be_written(llm: LLM, linear: list[CalibratedProfile], profiles: Path) -> None:
    profiles.write_text("not a directory")
    with pytest.raises(InputError, match=r"cannot be kept in .*PROLEPSIS_CACHE.*-o"):
        keep(linear[0])
    told: list[str] = []
    assert best_kept(llm, "bf16", told.append) is None
    assert len(told) == 1


@pytest.mark.usefixtures("profiles")
def test_several_keep_one_at_once(llm: LLM, linear: list[CalibratedProfile]) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(keep, linear * 4))
    assert len(set(paths)) == 2
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(path.name for path in set(paths))
    for path in set(paths):
        load_profile(path, llm, "bf16")
