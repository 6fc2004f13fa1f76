"""Predictors that look at earlier tokens read and write them where they are: in the engine's cache."""

import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_conversation import GREEDY, kv
from test_profiles import calibrated
from test_sessions import continued, damaged, grow

from prolepsis import LLM
from prolepsis.coding import SessionReader, SessionWriter
from prolepsis.engine.identity import geometry, identity
from prolepsis.engine.past import CachedPast
from prolepsis.engine.profiles import bind
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.session import load_session, save_session, write_session
from prolepsis.errors import CapacityError, SegmentError
from prolepsis.kv.stored import arrays_of
from prolepsis.model.decoder import PRECISIONS
from prolepsis.store import open_session

sys.path.insert(0, str(Path(__file__).parents[1] / "coding"))
from sequential_samples import EchoProfile


@pytest.fixture
def sequence(llm: LLM) -> Iterator[Sequence]:
    """600 computed tokens: three segments, the last within a block."""
    sequence = llm.runner.new_sequence([3 + i % 700 for i in range(600)])
    llm.runner.prefill(sequence)
    yield sequence
    sequence.release()


@pytest.fixture
def profile(llm: LLM) -> Any:
    return EchoProfile(geometry(llm, "bf16"))


def test_a_session_is_saved_from_the_blocks_it_lies_in(llm: LLM, sequence: Sequence, profile: Any) -> None:
    file, elsewhere, bits = BytesIO(), BytesIO(), kv(llm, sequence)
    write_session(file, llm, sequence, profile=profile)
    assert np.array_equal(kv(llm, sequence), bits)
    writer = SessionWriter(
        elsewhere, profile, dtype="bf16", rope=llm.rope, model=identity(llm), numerics=PRECISIONS["high"],
        block_size=llm.kv_cache.block_size,
    )  # fmt: skip
    writer.add(bits, sequence.tokens)
    writer.finish(SessionReader(file).metadata)
    assert file.getvalue() == elsewhere.getvalue()


def test_it_is_restored_and_grows(llm: LLM, sequence: Sequence, profile: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    for appended in (None, 5, 300):
        grow(llm, sequence, appended or 0)
        assert save_session(path, llm, sequence, profile=profile).appended == appended
        restored = load_session(path, llm, profile=profile).sequence
        llm.kv_cache.check([sequence.table, restored.table])
        assert np.array_equal(kv(llm, restored), kv(llm, sequence))
        restored.release()


def test_of_a_damaged_session_only_checked_tokens_stay(
    llm: LLM, sequence: Sequence, profile: Any, tmp_path: Path
) -> None:
    path = tmp_path / "s.pkv"
    save_session(path, llm, sequence, profile=profile)
    damaged(path, 0.6)
    with pytest.raises(SegmentError, match="segment 1 "):
        load_session(path, llm, profile=profile)
    llm.kv_cache.check([sequence.table])
    restored = load_session(path, llm, profile=profile, recompute=True).sequence
    assert (restored.num_cached, restored.table.capacity) == (256, 256)
    assert continued(llm, restored, GREEDY) == continued(llm, sequence, GREEDY)
    assert np.array_equal(kv(llm, restored), kv(llm, sequence))
    restored.release()


@pytest.mark.parametrize("dtype", ["fp16", "fp8_e5m2", "int8", "int4"])
def test_twins_read_and_write_any_cache_in_place(tiny: Path, tmp_path: Path, dtype: Any) -> None:
    """The file is that of a past of one's own, of bf16 where the cache is narrower; and so is what comes back."""
    llm, path = LLM(tiny, kv_dtype=dtype), tmp_path / "s.pkv"
    profile = bind(calibrated(llm, "twin-int8", dtype, 600).profile, llm)
    sequence = llm.runner.new_sequence([3 + i % 700 for i in range(300)])
    llm.runner.prefill(sequence)
    save_session(path, llm, sequence, profile=profile)
    with open_session(path, profile=profile) as reader:
        found = reader.read_all()  # without the engine's cache
    assert all(map(np.array_equal, arrays_of(found), arrays_of(kv(llm, sequence))))
    grow(llm, sequence, 50)
    assert save_session(path, llm, sequence, profile=profile).appended == 50
    restored = load_session(path, llm, profile=profile).sequence
    assert all(map(np.array_equal, arrays_of(kv(llm, restored)), arrays_of(kv(llm, sequence))))
    assert continued(llm, restored, GREEDY) == continued(llm, sequence, GREEDY)


def test_no_block_of_another_sequence_is_written_to(llm: LLM, sequence: Sequence) -> None:
    bits = kv(llm, sequence)
    other = Sequence(sequence.table.fork(), sequence.tokens)
    past = CachedPast(llm.runner, other)
    past.append(bits[:, :, :50])
    assert past.known == other.num_cached == 650
    assert np.array_equal(kv(llm, sequence), bits)
    assert np.array_equal(kv(llm, other), np.concatenate([bits, bits[:, :, :50]], axis=2))
    llm.kv_cache.check([sequence.table, other.table])
    past.known = 10
    past.blocks(300)
    past.discard_room()
    assert (other.num_cached, other.table.capacity) == (10, llm.kv_cache.block_size)
    other.release()


def test_no_room_leaves_it_as_it_was(tiny: Path, llm: LLM, sequence: Sequence, profile: Any, tmp_path: Path) -> None:
    save_session(tmp_path / "s.pkv", llm, sequence, profile=profile)
    small = LLM(tiny, kv_memory=24 * 32 * llm.kv_cache.bytes_per_token)
    held = small.runner.new_sequence([5] * 300)
    small.runner.prefill(held)
    with pytest.raises(CapacityError):
        load_session(tmp_path / "s.pkv", small, profile=profile, recompute=True)
    small.kv_cache.check([held.table])
