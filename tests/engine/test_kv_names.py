"""Names of segments: equal only where everything is that K and V depend on; and records of the latest ones."""

import random
from pathlib import Path

import msgspec
import pytest

from prolepsis import LLM
from prolepsis.engine import latest
from prolepsis.engine.kv_names import Names, latest_key, segment
from prolepsis.store.tier import check_key

TOKENS = random.Random(0).choices(range(1000), k=600)
PARENT = bytes(range(32))


def test_names_change_with_every_token_the_salt_and_the_cache(llm: LLM, tiny: Path) -> None:
    def digests(tokens: list[int], salt: str = "", model: LLM = llm) -> list[bytes]:
        return [name.digest for name in Names(model).chain(tokens, salt)]

    base = digests(TOKENS)
    assert digests(TOKENS) == base
    assert digests(TOKENS[:512]) == base[:2]
    assert [(name.start, name.stop) for name in Names(llm).chain(TOKENS, "")] == [(0, 256), (256, 512), (512, 600)]
    for at in (0, 255, 256, 511, 599):
        other = digests([*TOKENS[:at], TOKENS[at] + 1, *TOKENS[at + 1 :]])
        assert [mine == its for mine, its in zip(base, other, strict=True)] == [i < at // 256 for i in range(3)]
    others = [
        digests(TOKENS, "a"),
        digests(TOKENS, "\ud800"),
        digests(TOKENS, model=LLM(tiny, kv_memory=1 << 20, kv_dtype="fp16")),
        digests(TOKENS, model=LLM(tiny, kv_memory=1 << 20, precision="fast")),
        digests(TOKENS, model=LLM(tiny.with_name("Q8_0.gguf"), kv_memory=1 << 20)),
    ]
    assert len({digest for each in (base, *others) for digest in each}) == 3 * (1 + len(others))


def test_names_are_keys_of_the_store() -> None:
    check_key(segment(PARENT, 0, [1]).key)
    check_key(latest_key(PARENT))


def test_a_record_keeps_the_latest_and_leaves_out_what_they_begin_with() -> None:
    record = latest.read(latest.with_latest([], [1, 2]))
    assert record == [[1, 2]]
    record = latest.read(latest.with_latest(record, [1, 2, 3]))
    assert record == [[1, 2, 3]]
    for number in range(20):
        record = latest.read(latest.with_latest(record, [number] * 256))
    assert record == [[number] * 256 for number in range(19, 11, -1)]
    assert latest.best([[1, 2, 3], [1, 2, 9, 4], [5]], [1, 2, 9]) == ([1, 2, 9, 4], 3)
    assert latest.best([[5]], [1]) == ([], 0)
    assert [name.digest for name in latest.superseded([[1], [2], [1, 2]], [1, 2], PARENT, 0)] == [
        segment(PARENT, 0, [1]).digest
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([[]]),
        msgspec.msgpack.encode([[1] * 257]),
        msgspec.msgpack.encode([[-1]]),
        msgspec.msgpack.encode([[1 << 31]]),
        msgspec.msgpack.encode([["1"]]),
        msgspec.msgpack.encode([[1]] * 9),
        b"\xdd\xff\xff\xff\xff",
        bytes(1 << 17),
    ],
)
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        latest.read(data)
