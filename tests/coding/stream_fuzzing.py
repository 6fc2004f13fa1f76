"""Any bytes at all for the kernels that decode streams, in arrays that end where memory does.

`python stream_fuzzing.py SEED COUNT [FIRST]` decodes COUNT streams. Behind every array lies a page that cannot be
touched, before it bytes that must stay as they are; and only the stream's own place in what is decoded into may change.
"""

import ctypes
import faulthandler
import mmap
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from file_mutations import extreme, with_noise

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from forms import DTYPES, form_of
from stream_cases import blank, encoded, random_case
from test_kv_chain import tables_and_work

from prolepsis.coding import tables
from prolepsis.coding.cache_dtypes import DType, moderate_values
from prolepsis.kernels import kv_chain_streams, kv_streams, kv_tokens, rans
from prolepsis.kernels.kv_chain import GROUP

_FILL = 0x5A
_libc = ctypes.CDLL(None, use_errno=True)


class Fence:
    """Memory for arrays, each with an untouchable page behind it. Used again for each stream."""

    def __init__(self, count: int, size: int) -> None:
        """For up to `count` arrays of `size` bytes."""
        self._pages = -(-size // mmap.PAGESIZE) + 1
        self._maps = [mmap.mmap(-1, self._pages * mmap.PAGESIZE) for _ in range(count)]
        self._views = [np.frombuffer(m, np.uint8) for m in self._maps]
        for view in self._views:
            last = view.ctypes.data + (self._pages - 1) * mmap.PAGESIZE
            assert _libc.mprotect(ctypes.c_void_p(last), mmap.PAGESIZE, 0) == 0
        self._used: list[tuple[np.ndarray, np.ndarray]] = []

    def hold(self, array: np.ndarray) -> np.ndarray:
        """A copy that ends at the page."""
        room = self._views[len(self._used)][: (self._pages - 1) * mmap.PAGESIZE]
        before, own = room[: room.size - array.nbytes], room[room.size - array.nbytes :]
        before[-256:] = _FILL
        out = own.view(array.dtype).reshape(array.shape)
        out[...] = array
        self._used.append((before[-256:], out))
        return out

    def hold_all(self, arrays: Any) -> Any:
        """The same of a named tuple, whose numbers stay."""
        return type(arrays)(*(self.hold(a) if isinstance(a, np.ndarray) else a for a in arrays))

    def release(self) -> None:
        """Check what lies before the arrays."""
        assert all((before == _FILL).all() for before, _ in self._used), "something before an array was written"
        self._used.clear()


class Stream(NamedTuple):
    """Bytes, and between which of them the kernel is told to read."""

    data: np.ndarray
    begin: int
    end: int


def hostile(r: random.Random, sound: bytes, values: int) -> Stream:
    """A stream of `values` values with faults in it, or none at all, somewhere among other bytes."""
    way = r.randrange(8)
    words = int.from_bytes(sound[:4], "little")
    head = {
        0: words,
        1: words ^ 1 << 31,
        2: extreme(r, 32),
        3: r.randrange(len(sound) // 2 + 8) | r.getrandbits(1) << 31,
        4: 0xFFFFFFFF,
    }.get(way, words)
    body = sound[4:] if way in (0, 1, 2) else r.randbytes(r.choice((len(sound) - 4, 2 * values, 16, 128, 400)))
    data = head.to_bytes(4, "little") + body if way < 6 else with_noise(r, sound)
    if way == 7:
        data = data[: r.randrange(len(data) + 1)]
    front = r.choice((0, 0, 1, 7, 100))
    bounds = (front, front + len(data)) if r.random() < 0.9 else (r.randrange(len(data) + front + 1),) * 2
    padded = r.randbytes(front) + data + r.randbytes(rans.READ_AHEAD)
    return Stream(np.frombuffer(padded, np.uint8), *bounds)


def one_stream(r: random.Random, fence: Fence) -> bool:
    """Decode one stream of an even prediction; returns whether it was well formed."""
    dtype = r.choice(DTYPES)
    shape = r.choice(((256, 2, 48, 1), (256, 1, 64, 1), (33, 3, 50, 3), (100, 4, 16, 2), (7, 1, 3, 1), (1, 1, 1, 1)))
    case = random_case(np.random.default_rng(r.getrandbits(32)), dtype, *shape, width=r.choice((0.3, 4, 1e5)))
    known = _tables(dtype, r.random() < 0.5)
    sound = encoded(case, known.frequencies).tobytes()
    data, begin, end = hostile(r, sound, len(case.matrix) * case.row)
    out = fence.hold(np.full_like(case.matrix, 0xABCD))
    guess = fence.hold_all(case.guess)
    whole = kv_streams.decode_stream(
        fence.hold(data),
        begin,
        end,
        guess,
        known.form,
        known.bins,
        known.decode,
        out.reshape(-1),
        case.column,
        case.row,
    )
    own = slice(case.column, case.column + case.row)
    if sound == data[begin:end].tobytes():
        assert whole, "a sound stream is refused"
        assert np.array_equal(out[:, own], case.matrix[:, own]), "a wrong value"
    out[:, own] = 0xABCD
    assert (out == 0xABCD).all(), "another stream's values were overwritten"
    return bool(whole)


class _Tables(NamedTuple):
    form: np.ndarray
    bins: np.ndarray
    decode: np.ndarray
    floats: np.ndarray
    frequencies: np.ndarray


@cache
def _tables(dtype: DType, even: bool) -> _Tables:
    """What kernels look up, before untouchable pages."""
    form, frequencies = form_of(dtype), blank() if even else tables.universal(dtype)
    bins, decode = kv_tokens.token_bins(int(form[0])), rans.decode_table(frequencies)
    held: _Tables = Fence(5, decode.nbytes).hold_all(_Tables(form, bins, decode, moderate_values(dtype), frequencies))
    return held


def one_chain(r: random.Random, fence: Fence) -> bool:
    """Decode one stream of channels that are predicted from each other."""
    dtype, tokens, groups = r.choice(DTYPES), r.choice((1, 2, 35, 64, 256)), r.choice((1, 2, 5))
    known = _tables(dtype, r.random() < 0.5)
    _, channels, work = tables_and_work(tokens, groups, r.randrange(groups + 1), r.random() < 0.5, r.getrandbits(32))
    work.units[:, 0] = r.choice((1.0, np.inf, 1e-7, -3.0))
    begin = r.randrange(groups)
    n = tokens * GROUP * (groups - begin)
    plane = fence.hold(np.full((tokens, GROUP * groups), 0xABCD, np.uint16))
    scalars = fence.hold(np.zeros(n, np.uint16))
    data, first, last = hostile(r, _noisy_stream(r, n), n)
    whole = kv_chain_streams.decode_chain_stream(
        fence.hold(data), first, last, plane, begin, groups, fence.hold_all(channels), fence.hold_all(work),
        known.floats, known.form, known.bins, known.decode, scalars,
    )  # fmt: skip
    assert (plane[:, : GROUP * begin] == 0xABCD).all(), "another stream's values were overwritten"
    return bool(whole)


def _noisy_stream(r: random.Random, values: int) -> bytes:
    """Enough words and raw bits to go on for long."""
    lanes = 32 if values >= rans.SMALL_STREAM and r.random() < 0.7 else 4
    words = 2 * lanes + values // 2
    flag = (lanes == 4 and values >= rans.SMALL_STREAM) << 31
    return (words | flag).to_bytes(4, "little") + r.randbytes(2 * words + 2 * values)


def main(seed: int, count: int, first: int = 0) -> int:
    """Returns the exit code."""
    faulthandler.enable()
    fence, whole = Fence(30, 1 << 18), 0
    for number in range(first, first + count):
        if (number - first) % 50 == 0:
            print(number, file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(60, exit=True)
        r = random.Random(f"{seed}/{number}")
        try:
            whole += (one_chain if r.random() < 0.4 else one_stream)(r, fence)
            fence.release()
        except BaseException:
            print(f"failed: python {sys.argv[0]} {seed} 1 {number}", file=sys.stderr)
            raise
    faulthandler.cancel_dump_traceback_later()
    print(f"well formed: {whole}\nrefused: {count - whole}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
