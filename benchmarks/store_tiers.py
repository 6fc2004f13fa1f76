"""What a tier of the store costs, with few entries and with many: opening, putting, getting, evicting; and its speed.

python benchmarks/store_tiers.py [--tiers memory,disk,redis,file] [--entries 100,10000,100000] [--directory D] [--json]

Each tier is full of entries of 1,000 bytes when it is measured, so that each put evicts an entry, where a tier has a
budget. MB/s are those of entries of 1 MiB. Redis is a server of its own; disk and file are directories below D.
"""

import hashlib
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measuring import numbers, parser, report

from prolepsis.store import DiskTier, MemoryTier, Tier
from prolepsis.store.disk_index import cost_of
from prolepsis.store.frame import header_of
from prolepsis.store.redis_tier import RedisTier
from prolepsis.store.remote_tier import RemoteTier
from prolepsis.store.tier import path_of

SMALL = bytes(1000)
LARGE = random.Random(1).randbytes(1 << 20)
LARGE_ENTRIES = 16


def key(number: int) -> str:
    """The key of an entry."""
    return f"segment-{hashlib.blake2b(str(number).encode(), digest_size=32).hexdigest()}"


@dataclass(frozen=True)
class Kind:
    """How a kind of tier is opened for so many entries of a size, and filled with small ones."""

    open: Callable[[Path, int, int], Tier]
    fill: Callable[[Path, int], None] | None  # None: by puts


def write_files(directory: Path, entries: int) -> None:
    """What as many puts leave behind, without waiting for the disk; a disk tier makes its index anew."""
    for number in range(entries):
        path = directory / path_of(key(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header_of(key(number), SMALL) + SMALL)


def fill_disk(directory: Path, entries: int) -> None:
    """Files, without an index."""
    DiskTier(directory, 1).close()
    (directory / "index.sqlite").unlink()
    write_files(directory, entries)


def kinds(redis_url: str) -> dict[str, Kind]:
    """Every kind, by its name on the command line."""
    return {
        "memory": Kind(lambda place, entries, size: MemoryTier(entries * (size + 256)), None),
        "disk": Kind(lambda place, entries, size: DiskTier(place, entries * cost_of(size)), fill_disk),
        "redis": Kind(lambda place, entries, size: RedisTier(redis_url, "redis"), None),
        "file": Kind(lambda place, entries, size: RemoteTier(f"file://{place}", "file"), write_files),
    }


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of a server of our own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while "Ready to accept connections" not in server.stdout.readline():
            if server.poll() is not None:
                raise SystemExit("redis-server did not start")
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall-clock time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def milliseconds(work: Callable[[int], Any], choice: Sequence[int]) -> float:
    """Median time of a call for each of the numbers."""
    return 1000 * median(seconds_of(lambda number=number: work(number)) for number in choice)


def small_entries(kind: Kind, place: Path, entries: int, calls: int) -> dict[str, Any]:
    """What calls cost when there are so many entries."""
    first = None
    if kind.fill is not None:
        kind.fill(place, entries)
        first = seconds_of(lambda: kind.open(place, entries, len(SMALL)).close())
    start = time.perf_counter()
    tier = kind.open(place, entries, len(SMALL))
    opened = time.perf_counter() - start
    if kind.fill is None:
        for number in range(entries):
            tier.put(key(number), SMALL)
    there = random.Random(entries).choices(range(entries), k=calls)
    new = range(entries, entries + calls)
    row = {
        "open s": opened,
        "open without index s": first,
        "get ms": milliseconds(lambda number: tier.get(key(number)), there),
        "miss ms": milliseconds(lambda number: tier.get(key(number)), new),
        "size ms": milliseconds(lambda number: tier.size(key(number)), there),
        "put and evict ms": milliseconds(lambda number: tier.put(key(number), SMALL), new),
        "delete ms": milliseconds(lambda number: tier.delete(key(number)), new),
    }
    for number in [] if kind.fill else range(entries):
        tier.delete(key(number))
    tier.close()
    return row


def large_entries(kind: Kind, place: Path) -> dict[str, Any]:
    """Bytes a second, one entry after the other."""
    tier = kind.open(place, LARGE_ENTRIES, len(LARGE))
    put = milliseconds(lambda number: tier.put(key(number), LARGE), range(LARGE_ENTRIES))
    get = milliseconds(lambda number: tier.get(key(number)), range(LARGE_ENTRIES))
    tier.close()
    return {"put MB/s": len(LARGE) / put / 1000, "get MB/s": len(LARGE) / get / 1000}


def main() -> None:
    """Measure each tier with each number of entries."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--tiers", default="memory,disk,redis,file")
    flags.add_argument("--entries", type=numbers, default=[100, 10_000, 100_000])
    flags.add_argument("--calls", type=int, default=100, help="of each sort, of which the median is shown")
    flags.add_argument("--directory", type=Path, help="where directories are made, and removed again")
    arguments = flags.parse_args()
    names = arguments.tiers.split(",")
    rows = []
    with ExitStack() as opened:
        url = opened.enter_context(redis_server()) if "redis" in names else ""
        for name in names:
            for entries in arguments.entries:
                place = Path(tempfile.mkdtemp(dir=arguments.directory))
                opened.callback(shutil.rmtree, place, ignore_errors=True)
                kind = kinds(url)[name]
                row = small_entries(kind, place / "small", entries, arguments.calls)
                rows.append({"tier": name, "entries": entries, **row, **large_entries(kind, place / "large")})
                shutil.rmtree(place)
    report("tiers of the store", rows, arguments)


if __name__ == "__main__":
    main()
