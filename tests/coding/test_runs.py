"""kivi4 in the codec: runs of codes with a step and a minimum each, predicted as the values that they stand for."""

from io import BytesIO

import golden_kivi4
import numpy as np
import pytest
from file_parts import put_together, taken_apart
from kivi_samples import kivi_kv, spoil
from kv_samples import ROPE, realistic_kv, values
from spec_decoder import decode_file

from prolepsis.coding import SessionReader, SessionStream, SessionWriter, decode, encode, kv_array, runs
from prolepsis.coding.cache_dtypes import Geometry, KiviKV, arrays_of, to_float
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.profile import measure
from prolepsis.errors import InputError, SegmentError

KV = kivi_kv(layers=1, tokens=256, heads=2)


@pytest.fixture(scope="module")
def data() -> bytes:
    """The file of KV."""
    return encode(KV, rope=ROPE, token_ids=range(256))


def raw_bytes(kv: KiviKV) -> int:
    return sum(array.nbytes for array in kv)


def assert_equal(kv: object, expected: KiviKV) -> None:
    assert isinstance(kv, KiviKV)
    assert all(map(np.array_equal, kv, expected))


def assert_specified(data: bytes, kv: KiviKV) -> None:
    """The decoder that was written from the specification reads the same."""
    decoded = decode_file(data)
    low, high = kv.codes.astype(int) & 15, kv.codes.astype(int) >> 4
    numbers = np.concatenate([low, high], axis=-1) - 8
    assert np.array_equal(decoded.scalars, np.where(numbers >= 0, numbers, 0x8000 - 1 - numbers))
    assert np.array_equal(decoded.steps, kv.steps)
    assert np.array_equal(decoded.minimums, kv.minimums)


def test_values_are_code_times_step_plus_minimum() -> None:
    kv, random = kivi_kv(dim=64), np.random.default_rng(0)
    exact, read = values(realistic_kv(2, 256, 2, 64), "bf16"), to_float(runs.to_bf16(kv), "bf16")
    for layer, kind, token, head, channel in random.integers(0, (2, 2, 256, 2, 64), (300, 5)):
        row, t = divmod(token, 32)
        run, at = (channel, t) if kind == 0 else divmod(64 * t + channel, 32)
        where = layer, kind, row, head, run
        code = kv.codes[(*where, at % 16)] >> 4 * (at // 16) & 15
        step, low = kv.steps[where].view(np.float16), kv.minimums[where].view(np.float16)
        assert read[layer, kind, token, head, channel] == pytest.approx(code * float(step) + float(low), 2**-8, 1e-6)
        assert read[layer, kind, token, head, channel] == pytest.approx(
            exact[layer, kind, token, head, channel], 2**-7, 0.6 * float(step)
        )


def test_scalars_and_back() -> None:
    kv = kivi_kv(layers=2, tokens=128, heads=3, dim=64)
    assert_equal(runs.from_scalars(runs.to_scalars(kv), kv.steps, kv.minimums), kv)


def test_a_cache_gets_smaller_and_comes_back() -> None:
    kv = kivi_kv(layers=2, tokens=640, heads=2, dim=64)
    data = encode(kv, rope=ROPE)
    assert_equal(decode(data), kv)
    assert len(data) < 0.97 * raw_bytes(kv)
    assert len(data) < len(encode(kv))  # K is predicted where it was turned to
    assert [entry.count for entry in SessionReader(data).segments] == [256, 256, 128]


@pytest.mark.parametrize("predictor", ["static", "marginal"])
@pytest.mark.parametrize("layers", [1, 2])
def test_files_are_as_specified(predictor: str, layers: int) -> None:
    """Also the universal tables (one layer) and what no statistics expect."""
    kv = kivi_kv(layers=layers, tokens=128, heads=1, dim=64 if layers == 1 else 32, start=128)
    spoil(kv)
    file = BytesIO()
    profile = measure(kv, "kivi4", ROPE, 128, predictor)
    writer = SessionWriter(file, profile, dtype="kivi4", rope=ROPE, start=128, block_size=128, tokens="none")
    writer.add(kv)
    writer.finish()
    assert_equal(decode(file.getvalue()), kv)
    assert_specified(file.getvalue(), kv)


def test_the_golden_file_is_as_specified() -> None:
    data = golden_kivi4.FILE.read_bytes()
    kv = decode(data)
    assert isinstance(kv, KiviKV)
    assert_specified(data, kv)


def test_noise_grows_by_little() -> None:
    random = np.random.default_rng(0)
    shape = (1, 2, 8, 4, 64)
    halfs = random.integers(0, 1 << 16, (2, *shape)).astype(np.uint16)
    kv = KiviKV(random.integers(0, 256, (*shape, 16)).astype(np.uint8), *halfs)
    data = encode(kv)
    assert_equal(decode(data), kv)
    assert len(data) < 1.05 * raw_bytes(kv) + 3000


def test_files_grow_and_are_read_in_parts() -> None:
    kv, file = kivi_kv(layers=1, tokens=512, heads=1), BytesIO()
    writer = SessionWriter(file, measure(kv, "kivi4", ROPE), dtype="kivi4", rope=ROPE, block_size=128)
    writer.add(kv_array.part(kv, 0, 128), range(128))
    writer.finish()
    writer = SessionWriter.append_to(SessionReader(file))
    writer.add(kv_array.part(kv, 128, 512), range(128, 512))
    writer.finish()
    reader = SessionReader(file)
    assert [entry.count for entry in reader.segments] == [128, 128, 256]
    assert_equal(reader.read_all(), kv)
    assert_equal(reader.read_all(96, 288), KiviKV(*(array[:, :, 3:9] for array in kv)))
    assert reader.raw_bytes == raw_bytes(kv)
    assert sum(part.codes.shape[2] for _, part in SessionStream(BytesIO(file.getvalue()))) == 16
    with pytest.raises(InputError, match="kivi4 can be cut at multiples of 32 tokens only, not at 5"):
        reader.read_all(5)
    with pytest.raises(InputError, match="96 tokens are no whole blocks of 128"):
        SessionWriter.append_to(reader).add(kv_array.part(kv, 0, 96), range(96))


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 16},
        {"block_size": 256},
        {"head_dim": 16},
        {"head_dim": 64},
        {"dtype": "int4"},
        {"dtype": "bf16"},
        {"predictor": "linear/1"},
        {"start": 64},
        {"kv_heads": 4096, "heads_per_stream": 1},
        {"layers": 4096, "kv_heads": 8},
    ],
)
def test_hostile_headers(change: dict[str, object], data: bytes) -> None:
    header, records = taken_apart(data)
    assert put_together(header, records) == data
    hostile = put_together(header | change, records)
    with pytest.raises(SegmentError):
        decode(hostile)
    with pytest.raises(SegmentError):
        list(SessionStream(BytesIO(hostile)))


def test_a_segment_of_part_of_a_block_is_refused(data: bytes) -> None:
    for count in (96, 255):
        header, records = taken_apart(data)
        records[0].fields[1], records[0].fields[3] = count, count // 128
        records[0].rest = records[0].rest[: 4 * count] + records[0].rest[4 * 256 :]
        with pytest.raises(SegmentError, match=f"{count} tokens of kivi4 are no whole blocks of 128"):
            decode(put_together(header, records))


def test_every_flip_is_found(data: bytes) -> None:
    for i in np.random.default_rng(0).integers(0, len(data), 60):
        damaged = bytearray(data)
        damaged[i] ^= 1 << int(i) % 8
        with pytest.raises(SegmentError):
            decode(damaged)


def test_damage_is_named(data: bytes) -> None:
    segment = SessionReader(data).segments[0]
    damaged = bytearray(data)
    damaged[segment.offset + int(segment.index["length"][:4].sum())] ^= 1
    with pytest.raises(SegmentError, match=r"layer 0, V, minimums: its bytes are damaged"):
        decode(damaged)


def test_what_is_no_kivi4_is_refused() -> None:
    with pytest.raises(InputError, match=r"KiviKV of uint8 \(1, 2, 8, 2, 32, 16\), uint16 \(1, 2, 7, 2, 32\)"):
        encode(KV._replace(steps=KV.steps[:, :, :7]))
    with pytest.raises(InputError, match="KiviKV, which is kivi4, but dtype='int4' was asked for"):
        encode(KV, dtype="int4")
    with pytest.raises(InputError, match="knows nothing about minimums, so it is not one for kivi4"):
        encode(KV, profile=measure(realistic_kv(dim=32, dtype="int4"), "int4"))
    with pytest.raises(InputError, match="knows about minimums, so it is not one for int4"):
        encode(realistic_kv(dim=32, dtype="int4"), profile=measure(KV, None))
    with pytest.raises(InputError, match="there is no calibrating for kivi4"):
        CalibrationSample(Geometry.of(KV, "kivi4"), ROPE, 128)
    assert arrays_of(KV) is KV
