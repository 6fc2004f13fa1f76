"""Faults at random, in processes of their own: refused, or without effect, and never a crash (`fuzzing`)."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from file_parts import put_together, taken_apart
from linear_samples import VOCABULARY
from make_golden import GOLDEN, embedding_rows, outside_profile
from safetensors.numpy import save
from spec_linear import fingerprint, safetensors

from prolepsis.coding import SessionReader, decode
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.profile import Profile
from prolepsis.coding.profile_file import from_bytes
from prolepsis.errors import InputError, SegmentError

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
_SSE2 = ",".join(f"+{name}" for name in ("sse", "sse2", "mmx", "cmov", "cx8", "fxsr", "64bit"))
CHECKED = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": _SSE2, "NUMBA_BOUNDSCHECK": "1"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")


def fuzz(script: str, seed: int, count: int, **environment: str) -> dict[str, int]:
    """How many files, or streams, ended how."""
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / script), str(seed), str(count)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}"
    lines = (line.rsplit(": ", 1) for line in done.stdout.splitlines())
    return {name: int(number) for name, number in lines}


def assert_far_reaching(ends: dict[str, int]) -> None:
    """Faults in streams leave the other segments, and files that are sound in spite of their header are read."""
    assert ends["recoded: read"] > 10
    assert ends["recoded: as specified"] > 0
    assert ends["profile files: read"] > 0
    assert ends["streams: salvaged"] > ends["streams: read"]


def test_files() -> None:
    assert_far_reaching(fuzz("fuzzing.py", 1, 1200, PROLEPSIS_THREADS="1"))


def test_files_decoded_by_several_threads() -> None:
    assert fuzz("fuzzing.py", 2, 500, PROLEPSIS_THREADS="2")["recoded: read"] > 0


def test_streams() -> None:
    ends = fuzz("stream_fuzzing.py", 1, 2000)
    assert 0 < ends["well formed"] < ends["refused"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_many_files(seed: int) -> None:
    assert_far_reaching(fuzz("fuzzing.py", 1000 + seed, 50_000, PROLEPSIS_THREADS="2" if seed == 0 else "1"))


@pytest.mark.nightly
def test_many_streams() -> None:
    assert fuzz("stream_fuzzing.py", 1000, 50_000)["well formed"] > 0


@pytest.mark.nightly
def test_with_the_scalar_kernels_and_every_index_checked(tmp_path: Path) -> None:
    """What vectors do without checks, plain code does with them: the same streams are well formed."""
    plain = fuzz("stream_fuzzing.py", 2, 3000, PROLEPSIS_CACHE=str(tmp_path), **CHECKED)
    assert plain == fuzz("stream_fuzzing.py", 2, 3000)
    fuzz("fuzzing.py", 2, 3000, PROLEPSIS_CACHE=str(tmp_path), **CHECKED)


# What it found.


@pytest.mark.parametrize("size", [1 << 20, 1 << 34, 1 << 60])
def test_a_profile_that_claims_to_be_large_gets_no_memory(size: int) -> None:
    header, records = taken_apart((GOLDEN / "static_bf16.pkv").read_bytes())
    frame = b"\x28\xb5\x2f\xfd\xc0\x58" + size.to_bytes(8, "little") + b"\x01\0\0"
    profile = header["profile"][:1] + frame
    header |= {"profile": profile, "profile_fingerprint": xxhash.xxh3_128_hexdigest(profile)}
    with pytest.raises(SegmentError, match=f"the header is not valid: profile of {size} bytes where"):
        decode(put_together(header, records))


def test_nesting_without_end_is_refused() -> None:
    header, _ = taken_apart((GOLDEN / "static_bf16.pkv").read_bytes())
    nested = msgspec.Raw(b"\x91" * 200_000 + b"\xc0")
    with pytest.raises(SegmentError, match="the header is not valid: maximum recursion depth"):
        SessionReader(put_together(header | {"colour": nested}, [], minor=1))
    text = b'{"a":' + b"[" * 200_000
    with pytest.raises(InputError, match="is not a sound profile file"):
        from_bytes(len(text).to_bytes(8, "little") + text, "a.profile")


@pytest.mark.parametrize("change", [{"kv_heads": 2}, {"head_dim": 32}, {"layers": 4}, {"predictor": "static/1"}])
def test_an_outside_profile_must_be_one_for_the_header(change: dict) -> None:
    """Kernels would look for more channels than the profile has."""
    header, _ = taken_apart((GOLDEN / "linear_bf16.pkv").read_bytes())
    reader = SessionReader(put_together(header | change, []), profile=outside_profile("linear_bf16"), salvage=True)
    with pytest.raises(SegmentError, match="is not one of"):
        _ = reader.coder


def test_an_outside_profile_that_is_static_must_be_one_for_the_header() -> None:
    header, _ = taken_apart((GOLDEN / "static_bf16.pkv").read_bytes())
    own = SessionReader((GOLDEN / "static_bf16.pkv").read_bytes()).header
    profile = replace(Profile.from_bytes(header["profile"], own.geometry), embedded=False)
    for change, refused in (({}, False), ({"head_dim": 48}, True), ({"layers": 2}, True)):
        data = put_together(header | {"profile": None} | change, [])
        reader = SessionReader(data, profile=profile, salvage=True)
        if not refused:
            assert reader.coder.predictor.name == "static/1"
            continue
        with pytest.raises(SegmentError, match="is not one of"):
            _ = reader.coder


def test_an_embedding_of_another_width_is_refused() -> None:
    """Kernels would write more features than there is room for."""
    metadata, tensors = safetensors((GOLDEN / "linear_bf16.profile").read_bytes())
    about = json.loads(metadata["prolepsis"]) | {"hidden": 8}
    for name in ("token.means", "token.inverses"):
        tensors[name] = tensors[name][:8].copy()
    for name in ("token.upper.weights", "token.rest.weights"):
        tensors[name] = tensors[name][..., :16].copy()
    about["fingerprint"] = fingerprint(about, tensors)
    profile = from_bytes(save(tensors, {"prolepsis": json.dumps(about)}), "a.profile").profile
    assert isinstance(profile, LinearProfile)
    with pytest.raises(InputError, match="looks at embeddings of 8 numbers, and the model's have 24"):
        profile.bound_to(embedding_rows, VOCABULARY)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("linear_bf16", {"rope": {"theta": 1e4, "dim": 32, "style": "half"}}),
        ("linear_bf16", {"rope": {"theta": 1e4, "dim": 16, "style": "half", "frequency_factors": [1.0]}}),
    ],
)
def test_a_profile_file_whose_words_do_not_fit(name: str, change: dict) -> None:
    metadata, tensors = safetensors((GOLDEN / f"{name}.profile").read_bytes())
    about = json.loads(metadata["prolepsis"]) | change
    with pytest.raises(InputError, match="is not a sound profile file"):
        from_bytes(save(tensors, {"prolepsis": json.dumps(about)}), "a.profile")


def test_a_static_profile_file_of_no_known_predictor() -> None:
    header, _ = taken_apart((GOLDEN / "static_bf16.pkv").read_bytes())
    about = {
        **{key: header[key] for key in ("dtype", "layers", "kv_heads", "head_dim", "rope", "model")},
        "version": 1,
        "predictor": "static/1",
        "fingerprint": header["profile_fingerprint"],
        "tokens": 1,
    }
    tensors = {"static": np.frombuffer(header["profile"], np.uint8)}
    assert from_bytes(save(tensors, {"prolepsis": json.dumps(about)}), "a").profile.predictor_name == "static/1"
    with pytest.raises(InputError, match="does not hold what the predictor 'twin/9' needs"):
        from_bytes(save(tensors, {"prolepsis": json.dumps(about | {"predictor": "twin/9"})}), "a")
