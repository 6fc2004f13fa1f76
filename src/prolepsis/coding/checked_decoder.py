"""Segments of one session file to KV, with every check there is."""

from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.coding.any_profile import AnyProfile, geometry_of
from prolepsis.coding.cache_dtypes import KV
from prolepsis.coding.container import SegmentEntry
from prolepsis.coding.hashes import BlockHashes
from prolepsis.coding.header import Header
from prolepsis.coding.predictors import Past, Segment
from prolepsis.coding.profile import PREDICTORS, Profile, fingerprint
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.errors import InputError, SegmentError


class CheckedDecoder:
    """Decodes payloads under one header. `name` is how errors call the file."""

    def __init__(self, header: Header, name: str, profile: AnyProfile | None) -> None:
        """`profile`: for a file that keeps its own outside; else it is not looked at.

        Raises:
            SegmentError: the profile in the header is damaged, or its predictor unknown.
        """
        self.header, self.name = header, name
        self._given = profile
        self._hashes = BlockHashes(header.block_size)
        if header.profile is not None:
            _ = self.coder

    def use(self, profile: AnyProfile) -> None:
        """Take this for the profile that was given, before the first segment is decoded."""
        self._given = profile

    @cached_property
    def coder(self) -> SegmentCoder:
        """Raises SegmentError where the file's profile is kept outside and was not given."""
        header = self.header
        if header.profile is not None and header.predictor not in PREDICTORS:
            raise SegmentError(
                f"{self.name} was coded with the predictor {header.predictor!r}, which this Prolepsis does not have; "
                f"it has {', '.join(map(repr, PREDICTORS))}"
            )
        profile: AnyProfile = self._given_profile() if header.profile is None else self._own_profile(header.profile)
        try:
            coder = SegmentCoder(header.geometry, profile, header.rope, group=header.heads_per_stream)
        except InputError as error:
            raise SegmentError(f"{self.name} cannot be decoded: {error}") from error
        if coder.sequential and header.start:
            raise SegmentError(
                f"{self.name}: the header is not valid: {header.predictor!r} builds upon all tokens, and the first one "
                f"here has position {header.start}"
            )
        return coder

    @cached_property
    def past(self) -> Past | None:
        """The past of whoever brings none, where the coder is sequential."""
        return self.coder.new_past()

    def _given_profile(self) -> AnyProfile:
        wanted, profile = self.header.profile_fingerprint, self._given
        here = None if profile is None else profile.fingerprint
        if profile is None or here != wanted:
            told = "none was given" if here is None else f"the one given is {here}"
            raise SegmentError(
                f"{self.name} needs the profile {wanted} of the predictor {self.header.predictor!r}, which is not in "
                f"the file, and {told}: pass it with --profile"
            )
        predictor, geometry = self.header.predictor, self.header.geometry
        try:
            fits = (predictor, geometry) == (profile.predictor_name, geometry_of(profile, geometry.dtype))
        except InputError:  # it is for another dtype
            fits = False
        if not fits:
            raise SegmentError(
                f"{self.name}: the header is not valid: the profile {wanted} is not one of {predictor!r} for {geometry}"
            )
        return profile

    def _own_profile(self, data: bytes) -> Profile:
        if fingerprint(data) != self.header.profile_fingerprint:
            raise SegmentError(f"{self.name}: the header is not valid: the profile has another fingerprint")
        try:
            return Profile.from_bytes(data, self.header.geometry, self.header.predictor)
        except ValueError as error:
            raise SegmentError(f"{self.name}: the header is not valid: {error}") from error

    def check_hashes(self, number: int, entry: SegmentEntry) -> None:
        """Check the block hashes of the segment that follows the one before. Raises SegmentError."""
        if self.header.tokens == "ids" and not np.array_equal(self._hashes.add(entry.ids), entry.hashes):
            raise SegmentError(f"{self.name}: segment {number}: its token ids do not give its block hashes")

    def check_payload(self, number: int, entry: SegmentEntry, data: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        """`data`, the bytes of the streams and then room, if they are those that were written.

        Raises:
            SegmentError: names the stream whose bytes are damaged; or `data` is None, for a file that has ended.
        """
        if data is None:
            raise SegmentError(
                f"{self.name} is truncated: segment {number} needs {entry.payload_bytes} bytes from byte {entry.offset}"
            )
        begin = 0
        for stream, (length, expected, _) in enumerate(entry.index.tolist()):
            if xxhash.xxh3_64_intdigest(data[begin : begin + length].data) != expected:
                raise self._fault(number, entry, stream, "its bytes are damaged: their checksum differs")
            begin += length
        return data

    def decode(
        self,
        number: int,
        entry: SegmentEntry,
        data: NDArray[np.uint8] | None,
        out: NDArray[np.uint16] | None = None,
        past: Past | None = None,
    ) -> KV:
        """The values of segment `number`. data: its payload, then READ_AHEAD bytes of anything. out: `SegmentCoder`'s.

        past: that of the sequence, by default this decoder's own. Where the coder is sequential, it must know what is
        before the segment, and knows the segment too once every value has been checked.

        Raises:
            SegmentError: names the segment, and the stream where the fault lies in one; or the profile is missing.
        """
        coder, past = self.coder, self.past if past is None else past
        payload = self.check_payload(number, entry, data)
        expected = entry.index["values"].tolist()

        def check(stream: int, values: NDArray[np.uint16], sound: bool) -> None:
            if not sound:
                raise self._fault(number, entry, stream, "its bytes are no valid stream")
            if xxhash.xxh3_64_intdigest(values.data) != expected[stream]:
                what = "the decoded values are not those that were saved: checksum differs"
                raise self._fault(number, entry, stream, what)

        ids = entry.ids if self.header.tokens == "ids" else None
        ends = np.cumsum(entry.index["length"], dtype=np.int64)
        try:
            return coder.decode(Segment(entry.start, entry.count, ids), payload, ends, check, out, past)
        except SegmentError:
            raise
        except InputError as error:  # token ids or positions that the predictor does not know
            raise SegmentError(f"{self.name}: segment {number}: {error}") from error

    def _fault(self, number: int, entry: SegmentEntry, stream: int, what: str) -> SegmentError:
        tokens = f"tokens {entry.start}-{entry.stop - 1}"
        return SegmentError(f"{self.name}: segment {number} ({tokens}), {self.header.stream_name(stream)}: {what}")
