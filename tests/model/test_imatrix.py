import struct

import numpy as np
import pytest
from gguf_bytes import STRING, gguf, info, key

from prolepsis.errors import ModelFileError
from prolepsis.model.imatrix import read_imatrix

NAME = "blk.0.attn_q.weight"
SQUARES = np.array([2, 4, 0, 8], "<f4")


def new_format(counts_name=NAME + ".counts", sums=SQUARES, kind="imatrix"):
    infos = [info(NAME + ".in_sum2", (4, 1), 0, 0), info(counts_name, (1, 1), 0, 32)]
    return gguf([key("general.type", STRING, kind)], infos, sums.tobytes() + bytes(16) + np.float32([2]).tobytes())


def old_format(columns=4):
    name = NAME.encode()
    return struct.pack(f"<ii{len(name)}sii", 1, len(name), name, 2, columns) + SQUARES.tobytes()


def read(tmp_path, raw):
    path = tmp_path / "imatrix"
    path.write_bytes(raw)
    return read_imatrix(path)


@pytest.mark.parametrize("raw", [new_format(), old_format()], ids=["GGUF", "old"])
def test_mean_squares_by_tensor(tmp_path, raw):
    found = read(tmp_path, raw)
    assert list(found) == [NAME]
    assert found[NAME].dtype == np.float32
    assert found[NAME].tolist() == [1, 2, 0, 4]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (new_format("other"), "tensor 'blk.0.attn_q.weight.counts' is missing"),
        (new_format(sums=-SQUARES), "has values that are negative or not finite"),
        (new_format(sums=SQUARES * np.float32(np.nan)), "has values that are negative or not finite"),
        (new_format(kind="model"), "is not an i-matrix"),
        (old_format(5), "truncated or damaged"),
        (old_format(-2), "truncated or damaged"),
        (old_format()[:30], "truncated or damaged"),
        (b"nothing of the kind", "not a GGUF file"),
    ],
)
def test_bad_files(tmp_path, raw, message):
    with pytest.raises(ModelFileError, match=message):
        read(tmp_path, raw)


def test_no_file(tmp_path):
    with pytest.raises(ModelFileError, match="cannot be read: No such file"):
        read_imatrix(tmp_path / "absent")
