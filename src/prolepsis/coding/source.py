"""Where the bytes of a session file come from: a pipe, a file, or memory."""

from threading import Lock
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.kernels.rans import READ_AHEAD

_PIECE = 1 << 20  # bytes that are asked for at once, so that no more is allocated than arrives


class Source:
    """Bytes that come one after the other and cannot be had again, as from a pipe.

    name: what errors call it. position: how many bytes were taken.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self.position = 0
        self._file = file

    def read(self, length: int) -> bytes | bytearray | memoryview:
        """The next `length` bytes, fewer at the end."""
        data = bytearray()
        while len(data) < length and (piece := self._file.read(min(length - len(data), _PIECE))):
            data += piece
        self.position += len(data)
        return data

    def payload(self, length: int) -> NDArray[np.uint8] | None:
        """The next `length` bytes, then READ_AHEAD bytes of anything. None where there are fewer."""
        data = self.read(length)
        return _padded(data) if len(data) == length else None


class RandomSource(Source):
    """A file, or a buffer, whose bytes can be had in any order and more than once, by several threads."""

    size: int

    def skip(self, length: int) -> bool:
        """Leave the next `length` bytes out; False, and nothing done, where there are fewer."""
        raise NotImplementedError

    def payload_at(self, offset: int, length: int) -> NDArray[np.uint8] | None:
        """As `payload`, from byte `offset` on. `position` stays."""
        raise NotImplementedError


class FileSource(RandomSource):
    """A seekable binary file, from its first byte on."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file, name)
        try:
            self.size = file.seek(0, 2)
        except OSError as error:
            raise InputError(
                f"{name} cannot be read in any order ({error.strerror or error}); SessionStream can"
            ) from error
        self._lock = Lock()
        file.seek(0)

    def skip(self, length: int) -> bool:
        """See `RandomSource`."""
        if self.position + length > self.size:
            return False
        self.position = self._file.seek(self.position + length)
        return True

    def payload_at(self, offset: int, length: int) -> NDArray[np.uint8] | None:
        """See `RandomSource`. `length` must have been checked against `size` before."""
        data = np.zeros(length + READ_AHEAD, np.uint8)
        got = 0
        with self._lock:
            self._file.seek(offset)
            while got < length and (piece := self._file.read(length - got)):
                data[got : got + len(piece)] = np.frombuffer(piece, np.uint8)
                got += len(piece)
        return data if got == length else None


class BufferSource(RandomSource):
    """Bytes in memory, or of a mapped file. They are not copied, but for the last few of the buffer."""

    def __init__(self, buffer: memoryview, name: str) -> None:
        self.name = name
        self.position = 0
        self._view = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        self.size = len(self._view)
        self._data = _writable(self._view)

    def read(self, length: int) -> memoryview:
        """See `Source`."""
        data = self._view[self.position : self.position + length]
        self.position += len(data)
        return data

    def skip(self, length: int) -> bool:
        """See `RandomSource`."""
        if self.position + length > self.size:
            return False
        self.position += length
        return True

    def payload_at(self, offset: int, length: int) -> NDArray[np.uint8] | None:
        """See `RandomSource`."""
        if offset + length > self.size:
            return None
        if offset + length + READ_AHEAD <= self.size:
            return self._data[offset : offset + length + READ_AHEAD]
        return _padded(self._view[offset : offset + length])


def random_source(data: Any, name: str) -> RandomSource:
    """`data` is a seekable binary file, or anything with the buffer protocol: bytes, memoryview, mmap, an array."""
    name = name or str(getattr(data, "name", "the session data"))
    try:
        buffer = memoryview(data)
    except TypeError:
        return FileSource(data, name)
    return BufferSource(buffer, name)


def _padded(data: bytes | bytearray | memoryview) -> NDArray[np.uint8]:
    padded = np.zeros(len(data) + READ_AHEAD, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return padded


class _Alias:
    """Makes NumPy see memory as writable, which kernels are compiled for; they only read it."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "shape": array.shape, "typestr": "|u1", "data": (address, False)}


def _writable(view: memoryview) -> NDArray[np.uint8]:
    array = np.frombuffer(view, np.uint8)
    return array if array.flags.writeable else np.asarray(_Alias(array))
