"""Session files and profiles with faults put in at random, and what readers may make of them.

`python fuzzing.py SEED COUNT [FIRST]` reads COUNT of them and prints how each kind ended. A reader may refuse a file
(InputError) or give values that were once written; what a writer made under changed headers and profiles, it must
give, as the specification says. Anything else ends the run with the number of the file, and `python fuzzing.py SEED 1
NUMBER` reads it again. So does asking for more memory than there is reason to, or a minute for a few files.
"""

import faulthandler
import random
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

import golden_kivi4
import numpy as np
import xxhash
from file_mutations import CHANGES, Sample, changed_profile_file, headers, noise, profiles, rebound, splices
from file_parts import put_together, taken_apart
from make_golden import GOLDEN, NAMES, outside_profile
from spec_decoder import decode_file, header_of
from spec_linear import Linear

from prolepsis.coding import SessionReader, SessionStream, SessionWriter, decode, runs
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import KV, KiviKV, QuantisedKV, arrays_of, to_scalars
from prolepsis.coding.container import TRAILER
from prolepsis.errors import InputError

_ROOM = 4 << 30  # bytes of address space: one segment of the largest geometry takes 1 GiB, and its result another
_PATIENCE = 60  # seconds for `_BATCH` files
_BATCH = 50
_SPECIFIED_OF = 30  # one recoded file of so many is read by the decoder written from the specification


class Part(NamedTuple):
    """A segment that was read."""

    start: int
    count: int
    kv: KV


def samples() -> list[Sample]:
    """Small files of every dtype and predictor, two of them also as version 1 has them."""
    out: list[Sample] = []
    for name in NAMES:
        outside = GOLDEN / f"{name}.profile"
        file = outside.read_bytes() if outside.exists() else b""
        out.append(Sample(name, (GOLDEN / f"{name}.pkv").read_bytes(), outside_profile(name), file))
    out.append(Sample("static_kivi4", golden_kivi4.FILE.read_bytes(), None, b""))
    for name in ("static_bf16", "static_fp16"):
        header, records = taken_apart(out[NAMES.index(name)].data)
        out.append(Sample(f"{name} version 1", put_together(header, records[:3], version=1), None, b"", 1))
    return out


def whole_beginnings(sample: Sample) -> list[bytes]:
    """The file as each of its saves left it."""
    header, records = taken_apart(sample.data)
    ends = [i + 1 for i, record in enumerate(records) if record.layout is TRAILER]
    return [put_together(header, records[:end], sample.version) for end in ends]


def digests(part: Part, dtype: Any, group: int) -> list[int]:
    """xxh3-128 of the scalars of each stream, and of the steps and minimums."""
    values = part.kv.codes if isinstance(part.kv, KiviKV) else to_scalars(part.kv, dtype)
    pieces = [piece for layer in values for kind in layer for piece in np.split(kind, kind.shape[1] // group, axis=1)]
    if isinstance(part.kv, QuantisedKV | KiviKV):
        pieces += [kind for array in part.kv[1:] for layer in array for kind in layer]
    return [xxhash.xxh3_128_intdigest(np.ascontiguousarray(piece).data) for piece in pieces]


def read(way: str, data: bytes, profile: AnyProfile | None) -> list[Part] | None:
    """What a reader gives; None where it refuses. `salvaged`: all segments that are whole."""
    try:
        if way == "stream":
            return [Part(e.start, e.count, kv) for e, kv in SessionStream(BytesIO(data), profile=profile)]
        reader = SessionReader(BytesIO(data) if way == "file" else data, profile=profile, salvage=way == "salvaged")
        if way != "salvaged":
            return [Part(e.start, e.count, kv) for e, kv in reader.decoded()]
    except InputError:
        return None
    return [
        Part(e.start, e.count, kv) for i, e in enumerate(reader.segments) if (kv := _segment(reader, i)) is not None
    ]


def _segment(reader: SessionReader, number: int) -> KV | None:
    try:
        return reader.read(number)
    except InputError:
        return None


def joined(parts: list[Part]) -> list[np.ndarray]:
    """The values, and the steps, of all parts."""
    return [np.concatenate(arrays, axis=2) for arrays in zip(*(arrays_of(part.kv) for part in parts), strict=True)]


def same_arrays(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    """Whether they hold the same."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def same(a: list[Part] | None, b: list[Part] | None) -> bool:
    """Whether two readers came to the same."""
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(
        x[:2] == y[:2] and same_arrays(arrays_of(x.kv), arrays_of(y.kv)) for x, y in zip(a, b, strict=True)
    )


def recoded(header: dict[str, Any], written: list[Part], profile: AnyProfile | None) -> bytes | None:
    """A file of `written` under any header; None where that is refused."""
    file = BytesIO(put_together(header, []))
    try:
        writer = SessionWriter.append_to(SessionReader(file, profile=profile, salvage=True))
        for part in written:
            ids = np.arange(part.count) * 7 % 50 if header["tokens"] != "none" else None
            writer.add(part.kv, ids)
        writer.finish()
    except InputError:
        return None
    return file.getvalue()


def with_wild_values(r: random.Random, part: Part) -> Part:
    """Some values, and steps, that are anything at all."""
    arrays = [array.copy() for array in arrays_of(part.kv)]
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        places = np.array([r.randrange(flat.size) for _ in range(r.choice((0, 3, 300)))], np.int64)
        flat[places] = np.frombuffer(r.randbytes(len(places)), np.uint8)
    return part._replace(kv=like(part.kv, arrays))


def like(kv: KV, arrays: Sequence[np.ndarray]) -> KV:
    """The arrays as KV of the same type."""
    return type(kv)(*arrays) if isinstance(kv, QuantisedKV | KiviKV) else arrays[0]


class Fuzzer:
    """Changes samples and judges what becomes of them. `ends`: how many files of each kind of change ended how."""

    def __init__(self) -> None:
        self.samples = samples()
        self.embedding = np.load(GOLDEN / "embedding.npy")
        self.known: set[int] = set()
        self.written: dict[str, list[Part]] = {}
        self.ends: Counter[str] = Counter()
        self.whole: set[bytes] = set()
        for sample in self.samples:
            parts, header = read("buffer", sample.data, sample.profile), header_of(sample.data)
            assert parts is not None
            self.written[sample.name] = parts
            self.whole.update(whole_beginnings(sample))
            for part in parts:
                self.known.update(digests(part, header["dtype"], header["heads_per_stream"]))

    def one(self, r: random.Random) -> None:
        """Change a file and read it."""
        sample = r.choice(self.samples)
        change = r.choice(CHANGES)
        kind = change.__name__
        if sample.profile is not None and kind == "profiles":
            file = changed_profile_file(r, sample.profile_file)
            try:
                data, profile = rebound(sample, file, self.embedding)
            except InputError:
                self.ends["profile files: refused"] += 1
                return
            kind, sample = "profile files", sample._replace(profile=profile, profile_file=file)
        else:
            data = change(r, sample, self.samples)
        if change in (headers, profiles) and r.random() < 0.4:
            self.one_recoded(r, data, sample)
            return
        strict, parts = self.read_every_way(r, data, sample.profile)
        if change in (noise, splices):
            assert strict is None or data in self.whole, "a fault is overlooked"
        if parts:
            header = header_of(data)
            for part in parts:  # nothing but values that were written may come out
                assert self.known.issuperset(digests(part, header["dtype"], header["heads_per_stream"])), (
                    "a wrong value"
                )
        self.ends[f"{kind}: {'refused' if not parts else 'salvaged' if strict is None else 'read'}"] += 1

    def one_recoded(self, r: random.Random, data: bytes, sample: Sample) -> None:
        """The file as a writer would have made it, from values that may be anything: it must be read, and say what the
        specification says."""
        written = [with_wild_values(r, part) for part in self.written[sample.name]]
        header = header_of(data)
        new = recoded(header, written, sample.profile)
        if new is None:
            self.ends["recoded: refused"] += 1
            return
        values = joined(written)
        assert same_arrays(joined(self.read_every_way(r, new, sample.profile)[1]), values), "values changed"
        self.ends["recoded: read"] += 1
        if r.randrange(_SPECIFIED_OF) == 0:
            linear = None if sample.profile is None else Linear(header, sample.profile_file, self.embedding)
            kv = like(written[0].kv, values)
            scalars = runs.to_scalars(kv) if isinstance(kv, KiviKV) else to_scalars(kv, header["dtype"])
            specified = decode_file(new, linear).scalars.reshape(scalars.shape)
            assert np.array_equal(specified, scalars), "not what the specification says"
            self.ends["recoded: as specified"] += 1

    def read_every_way(
        self, r: random.Random, data: bytes, profile: AnyProfile | None
    ) -> tuple[list[Part] | None, list[Part]]:
        """What strict readers, which must agree, make of it, and what can be salvaged, which is no less."""
        strict = read("buffer", data, profile)
        assert same(strict, read(r.choice(("file", "stream")), data, profile)), "readers differ"
        salvaged = read("salvaged", data, profile) if strict is None or r.random() < 0.2 else strict
        if strict is not None:
            assert same(strict, salvaged), "salvaging differs"
        if r.random() < 0.3:
            self.require_whole(data, profile, strict)
        return strict, salvaged or []

    def require_whole(self, data: bytes, profile: AnyProfile | None, parts: list[Part] | None) -> None:
        """All values at once are those of the segments."""
        try:
            whole = SessionReader(data, profile=profile).read_all() if profile else decode(data)
        except InputError:
            assert parts is None, "what can be read in parts cannot be read as a whole"
            return
        assert parts is not None, "what cannot be read in parts can be read as a whole"
        assert not parts or same_arrays(arrays_of(whole), joined(parts)), "the whole differs from its parts"


def limit_memory() -> None:
    """Let allocations fail that go beyond `_ROOM`."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _ROOM, now + _ROOM))


def main(seed: int, count: int, first: int = 0) -> int:
    """Returns the exit code."""
    faulthandler.enable()
    fuzzer = Fuzzer()
    limit_memory()
    for number in range(first, first + count):
        if (number - first) % _BATCH == 0:
            print(number, file=sys.stderr, flush=True)  # the last one says where a crash was
            faulthandler.dump_traceback_later(_PATIENCE, exit=True)
        try:
            fuzzer.one(random.Random(f"{seed}/{number}"))
        except BaseException:
            traceback.print_exc()
            print(f"failed: python {' '.join(sys.argv[:1])} {seed} 1 {number}", file=sys.stderr)
            return 1
    faulthandler.cancel_dump_traceback_later()
    for kind, times in sorted(fuzzer.ends.items()):
        print(f"{kind}: {times}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
