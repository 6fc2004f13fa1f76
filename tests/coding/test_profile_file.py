"""Profile files: whole or refused."""

import errno
import os
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_samples import DIM, HEADS, LAYERS, ROPE, linear_kv, linear_profile, rows
from safetensors.numpy import load, save

from prolepsis.coding import decode, encode
from prolepsis.coding.cache_dtypes import Geometry, quantise
from prolepsis.coding.calibration import calibrate_linear
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import measure
from prolepsis.coding.profile_file import CalibratedProfile, from_bytes, to_bytes
from prolepsis.errors import InputError

GEOMETRY = Geometry("bf16", LAYERS, HEADS, DIM)
MODEL = {"file": "abc", "name": "tiny"}


@cache
def linear() -> bytes:
    """A file of a profile of `linear`."""
    return to_bytes(CalibratedProfile(linear_profile(), GEOMETRY, ROPE, MODEL, 3000))


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["linear", "static", "marginal"])
def test_round_trip(dtype: Any, kind: Any) -> None:
    geometry = Geometry(dtype, LAYERS, HEADS, DIM)
    kv, _ = linear_kv(300, dtype)
    profile = linear_profile(dtype) if kind == "linear" else measure(kv, dtype, ROPE, 0, kind)
    saved = CalibratedProfile(profile, geometry, ROPE, MODEL, 3000)
    data = to_bytes(saved)
    read = from_bytes(data, "a.profile")
    assert (read.geometry, read.rope, read.model, read.tokens) == (geometry, ROPE, MODEL, 3000)
    assert read.profile.fingerprint == profile.fingerprint
    assert read.profile.predictor_name == f"{kind}/1"
    assert to_bytes(read) == data
    if isinstance(read.profile, LinearProfile):
        assert read.profile.bound_to(rows, 50).predictor(ROPE).name == "linear/1"


def test_without_tokens() -> None:
    profile = linear_profile(with_tokens=False)
    read = from_bytes(to_bytes(CalibratedProfile(profile, GEOMETRY, ROPE, {}, 1)), "x").profile
    assert isinstance(read, LinearProfile)
    assert read.predictor(ROPE).name == "linear/1"


def test_every_truncation_is_refused() -> None:
    whole = linear()
    for length in [*range(0, 3000, 7), *range(3000, len(whole), 1009), len(whole) - 1]:
        with pytest.raises(InputError, match=r"a\.profile"):
            from_bytes(whole[:length], "a.profile")


@settings(max_examples=150, deadline=None)
@given(st.deferred(lambda: st.integers(0, len(linear()) - 1)), st.integers(1, 255))
def test_a_flipped_byte_is_found_or_changes_nothing(at: int, flip: int) -> None:
    """The metadata hold a few words that no prediction depends on, such as the model's name."""
    damaged = bytearray(linear())
    damaged[at] ^= flip
    try:
        read = from_bytes(bytes(damaged), "a.profile")
    except InputError:
        return
    assert read.profile.fingerprint == linear_profile().fingerprint


def changed(**fields: Any) -> bytes:
    """The profile file with other fields in its header."""
    length = int.from_bytes(linear()[:8], "little")
    header = msgspec.json.decode(msgspec.json.decode(linear()[8 : 8 + length])["__metadata__"]["prolepsis"])
    return bytes(save(load(linear()), {"prolepsis": msgspec.json.encode(header | fields).decode()}))


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"predictor": "static/1"},
        {"predictor": "twin/7"},
        {"fingerprint": "0" * 32},
        {"dtype": "fp64"},
        {"layers": 0},
        {"layers": 4096, "kv_heads": 4096, "head_dim": 4096},
        {"kv_heads": 1},
        {"hidden": 0},
        {"hidden": 1 << 20},
        {"vocabulary": 51},
        {"embedding": "another"},
        {"rope": {"theta": -1, "dim": 16, "style": "half"}},
        {"unknown": 1},
    ],
)
def test_hostile_headers(fields: dict[str, Any]) -> None:
    assert from_bytes(changed(), "a.profile").tokens == 3000
    with pytest.raises(InputError, match=r"a\.profile"):
        from_bytes(changed(**fields), "a.profile")


@pytest.mark.parametrize("data", [b"", b"GGUF", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}", b"[" * 100_000])
def test_foreign_files(data: bytes) -> None:
    with pytest.raises(InputError, match=r"a\.profile"):
        from_bytes(data, "a.profile")


def test_another_model_is_named() -> None:
    calibrated = from_bytes(linear(), "a.profile")
    calibrated.require("a.profile", MODEL, GEOMETRY, ROPE)
    with pytest.raises(InputError, match=r"a\.profile was calibrated for another model: file 'abc' there, 'xyz' here"):
        calibrated.require("a.profile", MODEL | {"file": "xyz"}, GEOMETRY, ROPE)
    with pytest.raises(InputError, match="another KV cache: dtype 'bf16' there, 'fp16' here"):
        calibrated.require("a.profile", MODEL, Geometry("fp16", LAYERS, HEADS, DIM), ROPE)
    with pytest.raises(InputError, match="another RoPE"):
        calibrated.require("a.profile", MODEL, GEOMETRY, None)


def test_hostile_numbers() -> None:
    tensors = load(linear())
    length = int.from_bytes(linear()[:8], "little")
    metadata = msgspec.json.decode(linear()[8 : 8 + length])["__metadata__"]
    tensors["base"] = np.full_like(tensors["base"], np.nan)
    with pytest.raises(InputError, match="not moderate"):
        from_bytes(bytes(save(tensors, metadata)), "a.profile")


@pytest.mark.parametrize("size", [1e-30, 1e-19, 1e30])
def test_a_profile_of_extreme_kv_can_be_read_again(size: float) -> None:
    values = np.random.default_rng(0).normal(size=(2, 2, 256, 1, 16)).astype(np.float32)
    values[..., 3] *= np.float32(size)
    kv, geometry = quantise(values, "bf16"), Geometry("bf16", 2, 1, 16)
    with CalibrationSample(geometry, None, 256) as sample:
        sample.add(Segment(0, 256), kv)
        profile = calibrate_linear(sample)
    read = from_bytes(to_bytes(CalibratedProfile(profile, geometry, None, {}, 256)), "x").profile
    assert np.array_equal(decode(encode(kv, dtype="bf16", profile=profile), profile=read), kv)


def test_calibration_that_does_not_fit_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it begins: writing to a mapped file on a full disk kills a process."""

    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room, raising=False)
    with pytest.raises(InputError, match=r"calibrating needs 1 MB for a while in .*No space left"):
        CalibrationSample(Geometry("bf16", 2, 1, 16), None, 8192)
