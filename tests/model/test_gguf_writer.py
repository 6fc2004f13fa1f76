import io
from pathlib import Path

import numpy as np
import pytest

from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.gguf_writer import TensorEntry, write_gguf

CASE = Path(__file__).parents[1] / "data" / "gguf" / "Q4_0.gguf"


def written(path, metadata, tensors):
    with path.open("wb") as file:
        write_gguf(file, metadata, tensors)
    return GGUFFile.open(path)


def test_a_copy_is_what_it_copies(tmp_path):
    original = GGUFFile.open(CASE)
    entries = [TensorEntry(t.name, t.shape, t.type_name, np.array_split(t.data, 3)) for t in original.tensors.values()]
    copy = written(tmp_path / "copy.gguf", original.encoded_metadata(), entries)
    assert copy.metadata == original.metadata
    assert copy.encoded_metadata() == original.encoded_metadata()
    assert list(copy.tensors) == list(original.tensors)
    for name, tensor in original.tensors.items():
        assert (copy.tensors[name].type_name, copy.tensors[name].shape) == (tensor.type_name, tensor.shape)
        assert np.array_equal(copy.tensors[name].data, tensor.data)


def test_the_gguf_package_reads_what_is_written(tmp_path):
    from gguf import GGUFReader, GGUFValueType

    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "negative": -3,
        "wide": 2**40,
        "eps": 1e-5,
        "flag": True,
        "tokens": ["a", "한", ""],
        "types": [1, 3, 2**20],
        "scores": [0, 0.5],
        "flags": [True, False],
        "none": [],
    }
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    written(tmp_path / "m.gguf", metadata, [TensorEntry("a", (2, 3), "F32", [values[:1], values[1:]])])
    reader = GGUFReader(tmp_path / "m.gguf")
    kinds = {name: reader.fields[name].types for name in metadata if name != "none"}
    array = GGUFValueType.ARRAY
    assert kinds["llama.block_count"] == [GGUFValueType.UINT32]
    assert kinds["negative"] == [GGUFValueType.INT32]
    assert kinds["wide"] == [GGUFValueType.UINT64]
    assert kinds["types"] == [array, GGUFValueType.INT32]
    assert kinds["scores"] == [array, GGUFValueType.FLOAT32]
    assert reader.fields["tokens"].contents() == ["a", "한", ""]
    assert reader.fields["eps"].contents() == float(np.float32(1e-5))
    assert np.array_equal(reader.tensors[0].data, values)


@pytest.mark.parametrize("chunks", [[bytes(17)], [bytes(18), bytes(1)], []])
def test_chunks_of_another_length(chunks):
    with pytest.raises(ValueError, match=r"w: \d+ bytes, but Q4_0 \(1, 32\) has 18"):
        write_gguf(io.BytesIO(), {}, [TensorEntry("w", (1, 32), "Q4_0", chunks)])


def test_rows_that_are_not_whole_blocks():
    with pytest.raises(ValueError, match="w: rows of 48 are not whole blocks of Q4_0"):
        write_gguf(io.BytesIO(), {}, [TensorEntry("w", (2, 48), "Q4_0", [bytes(54)])])


@pytest.mark.parametrize("value", [None, [1, "a"], {"a": 1}, 2**64, [[1]]])
def test_values_that_have_no_type(value):
    with pytest.raises((TypeError, OverflowError)):
        write_gguf(io.BytesIO(), {"key": value}, [])
