"""Models of several files, as llama.cpp's gguf-split makes them."""

import numpy as np
import pytest
from gguf_bytes import F32, STRING, gguf, info, key

from prolepsis.errors import ModelFileError
from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.gguf_parser import parse

U16, I32 = 2, 5


def part(no, count, names, total=3, more=()):
    keys = [key("split.no", U16, no), key("split.count", U16, count), key("split.tensors.count", I32, total), *more]
    data = b"".join(np.full(8, ord(name[0]), np.float32).tobytes() for name in names)
    return gguf(keys, [info(name, (8,), 0, 32 * i) for i, name in enumerate(names)], data)


@pytest.fixture
def parts(tmp_path):
    """Three parts of a model with the tensors a, b and c; the first has the metadata."""
    paths = [tmp_path / f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    contents = [part(0, 3, [], more=[key("general.name", STRING, "x")]), part(1, 3, ["a", "b"]), part(2, 3, ["c"])]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def refused(path):
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    return str(caught.value)


@pytest.mark.parametrize("opened", range(3))
def test_any_part_opens_all(parts, opened):
    import xxhash

    file = GGUFFile.open(parts[opened])
    assert file.path == parts[0]
    assert file.metadata["general.name"] == "x"
    assert {name: tensor.data.view(np.float32)[0] for name, tensor in file.tensors.items()} == {
        "a": ord("a"), "b": ord("b"), "c": ord("c")
    }  # fmt: skip
    everything = b"".join(path.read_bytes() for path in parts)
    assert file.fingerprint() == xxhash.xxh3_128_hexdigest(everything)
    assert file.size == len(everything)
    assert list(file.encoded_metadata()) == ["general.name"]


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_part_is_named(parts, missing):
    parts[missing].unlink()
    assert f"model-0000{missing + 1}-of-00003.gguf: no such file; model-00001-of-00003.gguf needs" in refused(parts[0])


def test_a_part_of_another_name(parts, tmp_path):
    other = parts[1].rename(tmp_path / "other.gguf")
    assert "part 2 of 3 of a split model, so its name must end in -00002-of-00003.gguf" in refused(other)


@pytest.mark.parametrize(
    ("changed", "content", "message"),
    [
        (2, part(1, 3, ["c"]), "00003-of-00003.gguf: split.no = 1, expected 2"),
        (2, part(2, 4, ["c"]), "00003-of-00003.gguf: split.count = 4, expected 3"),
        (2, gguf([]), "00003-of-00003.gguf: split.no = None, expected 2"),
        (2, part(2, 3, ["a"]), "00003-of-00003.gguf: tensor 'a' is in an earlier part, too"),
        (2, part(2, 3, ["c", "d"]), "split.tensors.count = 3, but its parts hold 4"),
        (2, b"GGUF", "00003-of-00003.gguf: truncated"),
        (0, gguf([key("split.count", F32, 3.0)]), "split.count = 3.0, expected a whole number"),
        (0, gguf([key("split.count", I32, -3)]), "split.count = -3, expected a whole number"),
        (0, gguf([key("split.count", U16, 3)]), "name must end in -00004-of-00003.gguf"),
        (0, part(0, 60000, []), "name must end in -00001-of-60000.gguf"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(parts, changed, content, message):
    parts[changed].write_bytes(content)
    assert message in refused(parts[0])


def test_one_part_of_one_needs_no_name(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(part(0, 1, ["a"], total=1))
    assert list(GGUFFile.open(path).tensors) == ["a"]


@pytest.mark.parametrize(("kind", "message"), [("imatrix", "is an i-matrix"), ("adapter", "is an adapter")])
def test_files_that_are_no_models(tmp_path, kind, message):
    path = tmp_path / "file.gguf"
    path.write_bytes(gguf([key("general.type", STRING, kind)]))
    with pytest.raises(ModelFileError, match=rf"file\.gguf: {message}"):
        ModelConfig.from_gguf(GGUFFile.open(path))


def test_an_old_imatrix_is_called_one(tmp_path):
    path = tmp_path / "imatrix.dat"
    name = b"blk.0.attn_q.weight"
    path.write_bytes(np.array([1, len(name)], "<i4").tobytes() + name + bytes(40))
    with pytest.raises(ModelFileError, match="is an i-matrix"):
        parse(path)
