"""Session files taken apart and put together again, with sound checksums whatever they say."""

from io import BytesIO
from typing import Any

import msgspec

from prolepsis.coding.container import INDEX_ENTRY, SEGMENT, TRAILER
from prolepsis.coding.hashes import checksum
from prolepsis.coding.header import MAGIC, PREAMBLE


class Counting(BytesIO):
    """A file that counts what is read of it."""

    amount = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.amount += len(data)
        return data


class Record:
    """One record of a file, to be changed. fields: those of its fixed part, without the checksum."""

    def __init__(self, data: bytes, at: int, header: dict[str, Any]) -> None:
        self.layout = SEGMENT if data[at : at + 4] == b"SEGM" else TRAILER
        *self.fields, _ = self.layout.unpack_from(data, at)
        rest = at + self.layout.size
        if self.layout is SEGMENT:
            ids = self.fields[1] if header["tokens"] == "ids" else 0
            size, payload = 4 * ids + 8 * self.fields[3] + INDEX_ENTRY.itemsize * streams_of(header), self.fields[5]
        else:
            size, payload = self.fields[1], 0
        self.rest = data[rest : rest + size]
        self.payload = data[rest + size : rest + size + payload]

    def packed(self, link: bytes) -> tuple[bytes, bytes]:
        """(what it is in a file, its checksum) behind a record with the checksum `link`."""
        front = self.layout.pack(*self.fields, 0)[:-8]
        own = checksum(link, front, self.rest)
        return front + own + self.rest + self.payload, own


def streams_of(header: dict[str, Any]) -> int:
    """Streams of each segment."""
    groups = header["kv_heads"] // header["heads_per_stream"]
    return 2 * header["layers"] * (groups + {"int8": 1, "int4": 1, "kivi4": 2}.get(header["dtype"], 0))


def taken_apart(data: bytes) -> tuple[dict[str, Any], list[Record]]:
    """The header and the records of a sound file."""
    at = PREAMBLE.size + PREAMBLE.unpack_from(data)[3]
    header = msgspec.msgpack.decode(data[PREAMBLE.size : at])
    records = []
    while at < len(data):
        records.append(Record(data, at, header))
        at += len(records[-1].packed(b"")[0])
    return header, records


def put_together(header: dict[str, Any], records: list[Record], version: int = 2, minor: int = 0) -> bytes:
    """A file with sound checksums, whatever it says."""
    body = msgspec.msgpack.encode(header)
    front = PREAMBLE.pack(MAGIC, version, minor, len(body), 0)[:-8]
    link = checksum(front, body)
    data = front + link + body
    for record in records:
        packed, link = record.packed(link if version > 1 else b"")
        data += packed
    return data
