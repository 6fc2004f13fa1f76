"""Reading a session file front to back, as it arrives through a pipe."""

from collections.abc import Iterator
from typing import BinaryIO

from numpy.typing import NDArray

from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import KV
from prolepsis.coding.checked_decoder import CheckedDecoder
from prolepsis.coding.container import SegmentEntry, Trailer, read_records
from prolepsis.coding.header import read_front
from prolepsis.coding.source import Source


class SessionStream:
    """A session file that can be read once only. Its header is read at once, the segments as they are iterated over.

    Iterating gives (SegmentEntry, values as `SessionReader.read` gives them), one segment in memory at a time; where
    its coder is sequential, the whole KV too. It ends only where the file is whole; until then nothing says that what
    came belongs to a whole save.

    `header` and `version` are there from the beginning; `metadata`, `saves` (the position behind the last token of
    each) and `bytes_read` are final once the iterator has ended.
    """

    def __init__(self, file: BinaryIO, name: str = "", *, profile: AnyProfile | None = None) -> None:
        """file: a binary file, of which only `read` is used. `name` and `profile` are those of `SessionReader`.

        Raises:
            SegmentError: what is wrong with the header.
        """
        self._source = Source(file, name or str(getattr(file, "name", "the session data")))
        self.name = self._source.name
        self._front = read_front(self._source)
        self.header, self.version = self._front.header, self._front.version
        self._decoder = CheckedDecoder(self.header, self.name, profile)
        self.metadata = b""
        self.saves: list[int] = []

    def use(self, profile: AnyProfile) -> None:
        """As `SessionReader.use`."""
        self._decoder.use(profile)

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the file so far."""
        return self._source.position

    def __iter__(self) -> Iterator[tuple[SegmentEntry, KV]]:
        """Every check of `SessionReader` is made before a segment is given. Raises SegmentError."""
        for number, (entry, payload) in enumerate(self._payloads()):
            yield entry, self._decoder.decode(number, entry, payload)

    def entries(self) -> Iterator[SegmentEntry]:
        """The segments, instead of iterating, without decoding them: their bytes are checked, their values are not."""
        for number, (entry, payload) in enumerate(self._payloads()):
            self._decoder.check_payload(number, entry, payload)
            yield entry

    def _payloads(self) -> Iterator[tuple[SegmentEntry, NDArray | None]]:
        number = 0
        for record in read_records(self._source, self._front):
            if isinstance(record, Trailer):
                self.metadata = record.metadata
                self.saves.append(record.stop)
            else:
                self._decoder.check_hashes(number, record)
                yield record, self._source.payload(record.payload_bytes)
                number += 1
