"""Profiles of a loaded model: calibrated, kept, used for sessions, and refused for another model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_conversation import kv

from prolepsis import LLM
from prolepsis.coding.cache_dtypes import QuantisedKV
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.profile_file import to_bytes
from prolepsis.engine.identity import geometry
from prolepsis.engine.profiles import calibrate, collect, compare, kv_of_texts, load_profile, read_profile
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import InputError, SegmentError

TEXTS = [[(7 * i + k) % 500 for i in range(700)] for k in (1, 40)]


def calibrated(llm: LLM, predictor: Any = "linear", dtype: Any = "bf16", tokens: int = 1200) -> Any:
    with collect(llm, kv_of_texts(llm, TEXTS, dtype, 512, tokens), dtype, tokens) as sample:
        assert sample.tokens == tokens
        return calibrate(llm, sample, predictor)


def test_texts_are_read_in_windows(llm: LLM) -> None:
    told: list[tuple[int, int]] = []
    windows = list(kv_of_texts(llm, TEXTS, "bf16", 512, 1000, lambda *step: told.append(step)))
    assert [len(w.ids) for w in windows] == [512, 188, 300]
    assert windows[1].ids.tolist() == TEXTS[0][512:]
    assert told == [(512, 1000), (700, 1000), (1000, 1000)]
    sequence = llm.runner.new_sequence(TEXTS[0][512:])
    llm.runner.prefill(sequence)
    assert np.array_equal(windows[1].kv, kv(llm, sequence))
    sequence.release()
    (quantised,) = kv_of_texts(llm, [TEXTS[0][:20]], "int4", 512, 20)
    assert isinstance(quantised.kv, QuantisedKV)


@pytest.mark.parametrize("predictor", ["linear", "static", "marginal"])
def test_a_session_is_saved_with_a_profile_and_read_with_it(llm: LLM, tmp_path: Path, predictor: str) -> None:
    (tmp_path / "p").write_bytes(to_bytes(calibrated(llm, predictor)))
    profile = load_profile(tmp_path / "p", llm, "bf16")
    sequence = llm.runner.new_sequence(TEXTS[1][:300])
    llm.runner.prefill(sequence)
    before = kv(llm, sequence)
    save_session(tmp_path / "s.pkv", llm, sequence, profile=profile)
    sequence.release()
    saved = load_session(tmp_path / "s.pkv", llm, profile=profile)
    assert np.array_equal(kv(llm, saved.sequence), before)
    assert saved.predictor == f"{predictor}/1"
    saved.sequence.release()
    if predictor == "linear":
        with pytest.raises(SegmentError, match="--profile"):
            load_session(tmp_path / "s.pkv", llm)
    else:  # small enough to lie in the file
        load_session(tmp_path / "s.pkv", llm).sequence.release()


def test_linear_is_worth_more_than_static(llm: LLM) -> None:
    """In a random model the lowest layer follows from the token, and that alone shows."""
    with collect(llm, kv_of_texts(llm, TEXTS, "bf16", 512, 1400), "bf16", 1400) as sample:
        rates = compare(calibrate(llm, sample, "linear"), sample, held_out=True)
    assert rates.ratio > rates.uncalibrated_ratio > 1


def test_a_profile_is_refused_for_another_model_or_dtype(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(to_bytes(calibrated(llm)))
    with pytest.raises(InputError, match="another KV cache: dtype 'bf16' there, 'fp16' here"):
        load_profile(tmp_path / "p", llm, "fp16")
    model = bytearray(llm.path.read_bytes())
    model[-1] ^= 1  # a weight
    (tmp_path / "other.gguf").write_bytes(model)
    with pytest.raises(InputError, match="calibrated for another model: file"):
        load_profile(tmp_path / "p", LLM(tmp_path / "other.gguf"), "bf16")


def test_files_that_are_none(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_profile(tmp_path / "missing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="is not a sound profile file"):
        load_profile(tmp_path / "text", llm, "bf16")


def test_nothing_to_calibrate_on(llm: LLM) -> None:
    with collect(llm, kv_of_texts(llm, [], "bf16", 512, 256), "bf16", 256) as sample, pytest.raises(InputError):
        calibrate(llm, sample, "linear")


def test_few_tokens_still_make_a_profile(llm: LLM) -> None:
    profile = calibrated(llm, tokens=5).profile
    assert isinstance(profile, LinearProfile)
    assert profile.geometry == geometry(llm, "bf16")
    assert profile.predictor(llm.rope).name == "linear/1"
