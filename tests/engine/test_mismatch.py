"""Whatever does not belong together, or was changed on the way, is noticed before a value of it is used."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_conversation import kv
from test_profiles import calibrated

from prolepsis import LLM
from prolepsis.coding import SessionReader, SessionWriter
from prolepsis.coding.cache_dtypes import quantise
from prolepsis.coding.container import INDEX_ENTRY
from prolepsis.coding.profile import measure
from prolepsis.engine.identity import geometry, identity
from prolepsis.engine.profiles import bind
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import SegmentError
from prolepsis.model.decoder import PRECISIONS

sys.path.insert(0, str(Path(__file__).parents[1] / "coding"))
from file_mutations import replace_streams
from file_parts import put_together, taken_apart
from sequential_samples import EchoProfile

SAVES = (40, 60, 80)


@cache
def static(llm: LLM, which: int) -> Any:
    normal = np.random.default_rng(which).normal(size=(1, 2, 90, llm.config.num_kv_heads, llm.config.head_dim))
    return measure(quantise(normal.astype(np.float32), "bf16"), "bf16", llm.rope, 0)


@cache
def linear(llm: LLM, which: int) -> Any:
    return bind(calibrated(llm, tokens=400 + 20 * which).profile, llm)


@cache
def sequential(llm: LLM, which: int) -> Any:
    return EchoProfile(geometry(llm, "bf16"), 0.5 + which / 4)


@cache
def twin(llm: LLM, which: int) -> Any:
    return bind(calibrated(llm, "twin-int8", tokens=400 + 20 * which).profile, llm)


class Saved(NamedTuple):
    """A session of a segment for each of SAVES: its file, tokens, KV, and the profile that it was saved with."""

    path: Path
    data: bytes
    tokens: list[int]
    kv: np.ndarray
    profile: Any


@pytest.fixture(params=[static, linear, sequential, twin], ids=lambda kind: kind.__name__)
def profiles(request: pytest.FixtureRequest) -> Callable[[LLM, int], Any]:
    """Two profiles of the same predictor."""
    return request.param


@pytest.fixture
def saved(profiles: Callable[[LLM, int], Any], llm: LLM, tmp_path: Path) -> Saved:
    path, profile, tokens = tmp_path / "s.pkv", profiles(llm, 0), [7 * i % 500 for i in range(SAVES[-1])]
    sequence = llm.runner.new_sequence()
    for stop in SAVES:
        sequence.tokens[:] = tokens[:stop]
        llm.runner.prefill(sequence)
        save_session(path, llm, sequence, profile=profile)
    saved = Saved(path, path.read_bytes(), tokens, kv(llm, sequence), profile)
    assert [segment.stop for segment in SessionReader(saved.data).segments] == list(SAVES)
    sequence.release()
    return saved


def assert_refused(llm: LLM, saved: Saved, told: str) -> None:
    """Even where what is damaged may be computed again."""
    for recompute in (False, True):
        with pytest.raises(SegmentError, match=told):
            load_session(saved.path, llm, profile=saved.profile, recompute=recompute)
        llm.kv_cache.check([])


def assert_computed_again(llm: LLM, saved: Saved, kept: int) -> None:
    """Of the tokens that are not refused, the KV of `kept` is restored; that of the rest is as if nothing was saved."""
    loaded = load_session(saved.path, llm, profile=saved.profile, recompute=True)
    sequence = loaded.sequence
    llm.kv_cache.check([sequence.table])
    assert sequence.num_cached == kept
    assert sequence.tokens == saved.tokens[: len(sequence.tokens)]
    if kept < len(sequence.tokens):
        llm.runner.prefill(sequence)
    bits = kv(llm, sequence)
    sequence.release()
    assert np.array_equal(bits, saved.kv[:, :, : bits.shape[2]])


INVALID = "the header is not valid"
OTHER_HEADERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "model": (lambda v: v | {"file": "0"}, "was saved with another model: file: '0'"),
    "numerics": (lambda v: "prolepsis-0", "numerics is 'prolepsis-0' in the file"),
    "predictor": (lambda v: "static/2", "'static/2'"),
    "profile_fingerprint": (lambda v: "0" * 32, "the profile has another fingerprint|needs the profile 0000"),
    "dtype": (lambda v: "fp16", "holds a fp16 cache"),
    "layers": (lambda v: v + 1, f"{INVALID}: profile of|index differs|layers is 2"),
    "kv_heads": (lambda v: v + 1, f"{INVALID}: 3 heads"),
    "head_dim": (lambda v: v + 1, f"{INVALID}: profile of|head_dim is 65"),
    "heads_per_stream": (lambda v: 1, "segment 0 is damaged"),
    "block_size": (lambda v: v // 2, "segment 0 is damaged"),
    "segment_tokens": (lambda v: v // 2, INVALID),
    "start": (lambda v: 256, "segment 0 is damaged|start is 256"),
    "tokens": (lambda v: "none", "segment 0 is damaged|tokens is 'none'"),
    "rope": (lambda v: v | {"theta": 9999.0}, "rope is .*9999.0"),
    "profile": (lambda v: b"0" if v is None else v[:-1], "the profile has another fingerprint|has 'static/1'"),
}


def test_every_field_of_the_header(llm: LLM, saved: Saved) -> None:
    header, records = taken_apart(saved.data)
    assert OTHER_HEADERS.keys() == header.keys()
    for key, (change, told) in OTHER_HEADERS.items():
        saved.path.write_bytes(put_together(header | {key: change(header[key])}, records))
        assert_refused(llm, saved, told)


def test_another_profile(llm: LLM, saved: Saved, profiles: Callable[[LLM, int], Any]) -> None:
    """Not asked for: refused. Asked for, by a changed header: what it decodes to is refused."""
    other = profiles(llm, 1)
    if not other.embedded:
        assert_refused(llm, saved._replace(profile=other), f"needs the profile {saved.profile.fingerprint}")
    header, records = taken_apart(saved.data)
    header["profile_fingerprint"] = other.fingerprint
    header["profile"] = other.to_bytes() if other.embedded else None
    saved.path.write_bytes(put_together(header, records))
    with pytest.raises(SegmentError, match=r"segment [01] .*, layer 0, K, heads 0-1: "):
        load_session(saved.path, llm, profile=other)
    llm.kv_cache.check([])
    first = next(fault.segment for fault in SessionReader(saved.path.read_bytes(), profile=other).faults())
    assert_computed_again(llm, saved._replace(profile=other), (0, *SAVES)[first])


def test_every_stream(llm: LLM, saved: Saved) -> None:
    """Its bytes; its bytes, and their checksum with them; the checksum of its values."""
    streams = 2 * llm.config.num_layers
    for segment, stream, what in np.ndindex(len(SAVES), streams, 3):
        header, records = taken_apart(saved.data)
        record = [r for r in records if r.payload][segment]
        index = np.frombuffer(record.rest[-INDEX_ENTRY.itemsize * streams :], INDEX_ENTRY).copy()
        parts = np.split(np.frombuffer(record.payload, np.uint8).copy(), np.cumsum(index["length"])[:-1])
        if what == 2:
            index["values"][stream] ^= 1
            record.rest = record.rest[: -index.nbytes] + index.tobytes()
        else:
            parts[stream][len(parts[stream]) // 2] ^= 1
            record.payload = b"".join(parts)
        if what == 1:
            replace_streams(record, [part.tobytes() for part in parts])
        saved.path.write_bytes(put_together(header, records))
        with pytest.raises(SegmentError, match=f"segment {segment} .*, layer 0, {'KV'[stream]}, heads 0-1: "):
            load_session(saved.path, llm, profile=saved.profile)
        assert_computed_again(llm, saved, (0, *SAVES)[segment])


def test_any_bit(llm: LLM, saved: Saved) -> None:
    """Of payload few bytes, of all else many: the file is refused, and nothing of it is ever taken for sound."""
    reader = SessionReader(saved.data)
    payload = {b for s in reader.segments for b in range(s.offset, s.offset + s.payload_bytes)}
    for at in range(len(saved.data)):
        if at % (997 if at in payload else 3):
            continue
        changed = bytearray(saved.data)
        changed[at] ^= 1 << at % 8
        saved.path.write_bytes(changed)
        with pytest.raises(SegmentError, match=r"s\.pkv"):
            load_session(saved.path, llm, profile=saved.profile)
        try:
            loaded = load_session(saved.path, llm, profile=saved.profile, recompute=True)
        except SegmentError:
            continue
        bits = kv(llm, loaded.sequence)
        assert loaded.sequence.tokens == saved.tokens[: len(loaded.sequence.tokens)]
        loaded.sequence.release()
        assert np.array_equal(bits, saved.kv[:, :, : bits.shape[2]])
    llm.kv_cache.check([])


def test_nothing_is_appended_to_kv_of_other_bits(llm: LLM, tmp_path: Path) -> None:
    """It would be coded with the cache's K and V, and decoded with the file's."""
    tokens, profile = [7 * i % 500 for i in range(60)], twin(llm, 0)
    sequence = llm.runner.new_sequence(tokens)
    llm.runner.prefill(sequence)
    changed = llm.kv_cache.read(sequence.table, 0, 40)
    changed[0, 0, 7] ^= 1
    header = {"model": identity(llm), "numerics": PRECISIONS["high"], "block_size": llm.kv_cache.block_size}
    with open(tmp_path / "s.pkv", "w+b") as file:
        writer = SessionWriter(file, profile, dtype="bf16", rope=llm.rope, **header)
        writer.add(changed, tokens[:40])
        writer.finish(b'{"messages":[],"pending":[]}')
    assert save_session(tmp_path / "s.pkv", llm, sequence, profile=profile).appended is None
    expected = kv(llm, sequence)
    sequence.release()
    saved = load_session(tmp_path / "s.pkv", llm, profile=profile)
    assert np.array_equal(kv(llm, saved.sequence), expected)
    saved.sequence.release()
