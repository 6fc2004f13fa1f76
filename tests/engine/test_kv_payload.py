"""Payloads: all that a segment is, or an error."""

import random

import numpy as np
import pytest

from prolepsis import LLM
from prolepsis.coding.profile import measure
from prolepsis.engine.kv_names import Names, SegmentName
from prolepsis.engine.kv_payload import PayloadCodec
from prolepsis.errors import SegmentError

IDS = random.Random(0).choices(range(1000), k=300)


@pytest.fixture
def tail(llm: LLM) -> tuple[SegmentName, list[int], np.ndarray]:
    """The second segment of a sequence: its name, ids, and what stands for its K and V."""
    name = list(Names(llm).chain(IDS, ""))[1]
    cache = llm.kv_cache
    shape = (cache.num_layers, 2, len(IDS) - 256, cache.num_kv_heads, cache.head_dim)
    return name, IDS[256:], np.random.default_rng(0).normal(size=shape).astype(np.float32).view(np.uint32) >> 16


def test_a_payload_gives_back_what_it_was_given(llm: LLM, tail: tuple[SegmentName, list[int], np.ndarray]) -> None:
    name, ids, values = tail
    kv = values.astype(np.uint16)
    found, predictor = PayloadCodec(llm).decode(PayloadCodec(llm).encode(name, ids, kv), name, ids)
    assert np.array_equal(found, kv)
    assert predictor == "static"
    marginal = PayloadCodec(llm).encode(name, ids, kv, measure(kv, "bf16", llm.rope, 256, "marginal"))
    assert PayloadCodec(llm).decode(marginal, name, ids)[1] == "marginal"


def test_every_changed_byte_and_every_cut_is_found(llm: LLM, tail: tuple[SegmentName, list[int], np.ndarray]) -> None:
    name, ids, values = tail
    codec = PayloadCodec(llm)
    data = codec.encode(name, ids, values.astype(np.uint16))
    draw = random.Random(0)
    places = [*range(300), *draw.sample(range(300, len(data)), 300)]
    for at in places:
        with pytest.raises(SegmentError):
            codec.decode(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :], name, ids)
    for at in places[::10]:
        with pytest.raises(SegmentError):
            codec.decode(data[:at], name, ids)
    with pytest.raises(SegmentError, match="more than"):
        codec.decode(bytes(1 << 22), name, ids)


def test_a_payload_of_another_segment_is_refused(llm: LLM, tail: tuple[SegmentName, list[int], np.ndarray]) -> None:
    name, ids, values = tail
    codec, kv = PayloadCodec(llm), values.astype(np.uint16)
    data = codec.encode(name, ids, kv)
    with pytest.raises(SegmentError, match="another segment"):
        codec.decode(data, name, [ids[0] + 1, *ids[1:]])
    with pytest.raises(SegmentError, match="another segment"):
        codec.decode(data, name._replace(digest=bytes(32)), ids)
    with pytest.raises(SegmentError, match="start"):
        codec.decode(data, name._replace(start=512), ids)


def test_a_payload_of_another_model_or_arithmetic_is_refused(
    llm: LLM, tail: tuple[SegmentName, list[int], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ids, values = tail
    theirs = PayloadCodec(llm)
    with monkeypatch.context() as patch:
        patch.setattr(theirs, "_identity", {"architecture": "llama", "file": "another", "name": "another"})
        other_model = theirs.encode(name, ids, values.astype(np.uint16))
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner.decoder, "numerics", "another")
        other_numerics = theirs.encode(name, ids, values.astype(np.uint16))
    codec = PayloadCodec(llm)
    with pytest.raises(SegmentError, match="another model"):
        codec.decode(other_model, name, ids)
    with pytest.raises(SegmentError, match="numerics"):
        codec.decode(other_numerics, name, ids)
