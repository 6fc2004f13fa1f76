import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import ARRAY, F32, STRING, U32, gguf, info, key, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prolepsis.errors import ModelFileError
from prolepsis.model.gguf_file import GGUFFile

CASE = Path(__file__).parents[1] / "data" / "gguf" / "Q4_0.gguf"
F32_TYPE, Q4_0_TYPE = 0, 2


def written(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return path


def refused(tmp_path: Path, raw: bytes) -> str:
    path = written(tmp_path, raw)
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def two_tensors() -> bytes:
    infos = [info("a", (2, 3), F32_TYPE, 0), info("b", (64, 2), Q4_0_TYPE, 32)]
    return gguf([key("general.name", STRING, "x")], infos, bytes(range(32 + 72)))


def test_reads_every_kind_of_value(tmp_path):
    scalars = {0: 250, 1: -3, 2: 65_000, 3: -300, 4: 2**32 - 1, 5: -(2**31), 7: True, 10: 2**64 - 1, 11: -(2**63)}
    keys = [key(f"k{kind}", kind, data) for kind, data in scalars.items()]
    keys += [key("f", F32, 0.5), key("d", 12, 0.1), key("s", STRING, "한\0글"), key("e", ARRAY, (STRING, []))]
    keys += [
        key("n", ARRAY, (U32, [1, 2])),
        key("t", ARRAY, (STRING, ["a", "", "é"])),
        key("b", ARRAY, (7, [True, False])),
    ]
    keys += [key("nested", ARRAY, (ARRAY, [(U32, [1]), (STRING, ["x"])]))]
    read = GGUFFile.open(written(tmp_path, gguf(keys))).metadata
    assert read == {
        **{f"k{kind}": data for kind, data in scalars.items()},
        "f": 0.5,
        "d": 0.1,
        "s": "한\0글",
        "e": [],
        "n": [1, 2],
        "t": ["a", "", "é"],
        "b": [True, False],
        "nested": [[1], ["x"]],
    }


def test_tensors_are_read_only_views_in_numpy_order(tmp_path):
    raw = two_tensors()
    file = GGUFFile.open(written(tmp_path, raw))
    a, b = file.tensors["a"], file.tensors["b"]
    assert (a.type_name, a.shape, a.data.dtype, a.data.shape) == ("F32", (3, 2), np.uint8, (24,))
    assert (b.type_name, b.shape, b.data.shape) == ("Q4_0", (2, 64), (72,))
    assert a.data.tobytes() == bytes(range(24))
    assert b.data.tobytes() == bytes(range(32, 104))
    assert not a.data.flags.writeable
    assert not a.data.flags.owndata
    assert np.shares_memory(file.tensors["a"].data, a.data)


def test_views_outlive_the_file_object(tmp_path):
    data = GGUFFile.open(written(tmp_path, two_tensors())).tensors["b"].data
    assert data.tobytes() == bytes(range(32, 104))


def test_agrees_with_the_gguf_package():
    from gguf import GGUFReader

    reference, file = GGUFReader(CASE), GGUFFile.open(CASE)
    assert set(file.tensors) == {tensor.name for tensor in reference.tensors}
    for tensor in reference.tensors:
        ours = file.tensors[tensor.name]
        assert ours.type_name == tensor.tensor_type.name
        assert ours.shape == tuple(int(extent) for extent in reversed(tensor.shape))
        assert ours.data.tobytes() == tensor.data.tobytes()
    names = [name for name in reference.fields if not name.startswith("GGUF.")]
    assert file.metadata == {name: reference.fields[name].contents() for name in names}


def test_fingerprint_is_xxh3_of_the_file_and_changes_with_any_byte(tmp_path):
    import xxhash

    raw = two_tensors()
    before = GGUFFile.open(written(tmp_path, raw)).fingerprint()
    assert before == xxhash.xxh3_128_hexdigest(raw)
    other = tmp_path / "other.gguf"
    other.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert GGUFFile.open(other).fingerprint() != before


@pytest.mark.parametrize("beside", ["bias", "scale"])
def test_what_a_product_does_not_compute_is_refused(tmp_path, beside):
    infos = [info("q.weight", (32, 2), F32_TYPE, 0), info(f"q.{beside}", (2,), F32_TYPE, 256)]
    with pytest.raises(ModelFileError, match=f"tensor 'q.{beside}' is there: a {beside} is not supported"):
        GGUFFile.open(written(tmp_path, gguf([], infos, bytes(256) + b"\1" * 8))).matrix("q.weight", (2, 32))
    GGUFFile.open(written(tmp_path, gguf([], infos, bytes(264)))).matrix("q.weight", (2, 32))


def test_version_2_is_read(tmp_path):
    assert GGUFFile.open(written(tmp_path, gguf([key("a", U32, 1)], version=2))).metadata == {"a": 1}


def test_alignment_of_the_file_is_obeyed(tmp_path):
    keys = [key("general.alignment", U32, 8)]
    raw = gguf(keys, [info("a", (2,), F32_TYPE, 0), info("b", (2,), F32_TYPE, 8)], bytes(range(16)), alignment=8)
    file = GGUFFile.open(written(tmp_path, raw))
    assert file.tensors["b"].data.tobytes() == bytes(range(8, 16))


def test_missing_directory_and_special_files(tmp_path):
    with pytest.raises(ModelFileError, match="no such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="is a directory"):
        GGUFFile.open(tmp_path)
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUFFile.open("a\0b")


@pytest.mark.skipif(sys.platform == "win32", reason="needs /dev/null")
def test_device_file():
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile.open("/dev/null")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the file is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\3\4 something else entirely", "not a GGUF file: it begins with b'PK"),
        (b"GGUF", "version does not fit"),
        (gguf([], order=">"), "big-endian GGUF"),
        (gguf([], version=1), "GGUF version 1; versions 2 and 3 are read"),
        (gguf([], version=4), "GGUF version 4; versions 2 and 3 are read"),
        (gguf([], counts=(0, 2**60)), "metadata count = "),
        (gguf([], counts=(2**60, 0)), "tensor count = "),
        (gguf([text(b"\xff") + struct.pack("<IB", 0, 1)]), "metadata key 0 is not valid UTF-8"),
        (gguf([struct.pack("<Q", 2**63) + b"x" * 20]), "metadata key 0 claims"),
        (gguf([key("a", U32, 1), key("a", U32, 1)]), "metadata key 'a' occurs twice"),
        (gguf([text("a") + struct.pack("<I", 13) + b"pad"]), "metadata key 'a' has unknown value type 13"),
        (gguf([text("a") + struct.pack("<IQ", STRING, 2**40)]), "value of 'a' does not fit"),
        (gguf([text("a") + struct.pack("<IIQ", ARRAY, U32, 2**62)]), "value of 'a' does not fit"),
        (gguf([text("a") + struct.pack("<IIQ", ARRAY, STRING, 2**62)]), "element count of 'a' = "),
        (gguf([text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 2**62)]), "element count of 'a' = "),
        (gguf([text("a") + struct.pack("<IIQQ", ARRAY, STRING, 1, 2**64 - 1)]), "value of 'a' does not fit"),
        (gguf([key("a", ARRAY, (STRING, [b"\xc3"]))]), "a string of 'a' is not valid UTF-8"),
        (gguf([key("a", STRING, b"\xed\xa0\x80")]), "value of 'a' is not valid UTF-8"),
        (
            gguf([key("a", ARRAY, (ARRAY, [(ARRAY, [(ARRAY, [(ARRAY, [(U32, [1])])])])]))]),
            "nests arrays more than 4 deep",
        ),
        (gguf([], [info("w", (0, 2), 0, 0)], bytes(64)), "tensor 'w' has an empty shape (2, 0)"),
        (gguf([], [info("w", (), 0, 0)], bytes(64)), "tensor 'w' has 0 dimensions"),
        (gguf([], [info("w", (1,) * 5, 0, 0)], bytes(64)), "tensor 'w' has 5 dimensions"),
        (gguf([], [info("w", (2,), 999, 0)], bytes(64)), "tensor 'w' has unknown type number 999; known are F32"),
        (gguf([], [info("w", (33, 32), 2, 0)], bytes(4096)), "rows of 33 are not a multiple of Q4_0's block of 32"),
        (gguf([], [info("w", (2**62, 2**62), 0, 0)], bytes(64)), "tensor 'w' (F32, "),
        (gguf([], [info("w", (32,), 0, 0)], bytes(64)), "tensor 'w' (F32, 128 bytes"),
        (gguf([], [info("w", (2,), 0, 2**63)], bytes(64)), "tensor 'w' (F32, 8 bytes"),
        (gguf([], [info("w", (2,), 0, 4)], bytes(64)), "tensor 'w' begins at 4, not a multiple"),
        (gguf([], [info("w", (2,), 0, 0)] * 2, bytes(64)), "tensor 'w' occurs twice"),
        (gguf([], [info("v", (9,), 0, 0), info("w", (2,), 0, 32)], bytes(64)), "tensors 'v' and 'w' overlap"),
        (gguf([], [info(b"\xff", (2,), 0, 0)], bytes(64)), "name of tensor 0 is not valid UTF-8"),
        (gguf([key("general.alignment", U32, 24)], [info("w", (2,), 0, 0)], bytes(99)), "general.alignment is 24"),
        (gguf([key("general.alignment", U32, 0)]), "general.alignment is 0"),
        (gguf([key("general.alignment", STRING, "32")]), "general.alignment is '32'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_files_say_what_is_wrong(tmp_path, raw, message):
    assert message in refused(tmp_path, raw)


def test_truncated_anywhere(tmp_path):
    raw = two_tensors()
    for length in range(1, len(raw)):
        refused(tmp_path, raw[:length])


def test_truncated_real_file(tmp_path):
    raw = CASE.read_bytes()
    for length in (24, 1_000, 20_000, 40_000, len(raw) // 2, len(raw) - 1):
        refused(tmp_path, raw[:length])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_are_refused_or_read_within_bounds(tmp_path, data):
    raw = bytearray(two_tensors())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        file = GGUFFile.open(written(tmp_path, bytes(raw)))
    except ModelFileError:
        return
    assert all(tensor.data.size <= len(raw) for tensor in file.tensors.values())
