"""A segment as bytes: a session file of its own, so that everything about it is compared before it is used."""

from collections.abc import Sequence

from prolepsis.coding import SessionReader, encode, kv_array
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import KV, arrays_of
from prolepsis.coding.profile import GRID
from prolepsis.engine.identity import geometry, identity
from prolepsis.engine.kv_names import SegmentName
from prolepsis.engine.llm import LLM
from prolepsis.engine.profile_store import profile_of_session
from prolepsis.errors import SegmentError

_SPARE = 1 << 20  # bytes that a payload may have beyond its raw K and V: header, index, profile


class PayloadCodec:
    """Codes segments of one model's cache. Any thread may use it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._identity = identity(llm)
        self._profiles: dict[str, AnyProfile] = {}

    def warm_up(self, profile: AnyProfile | None) -> None:
        """Code a segment of nothing and decode it, so that the first one does not wait for kernels to be loaded."""
        kv, ids = kv_array.empty(geometry(self._llm, self._llm.kv_cache.dtype), GRID), [0] * GRID
        for array in arrays_of(kv):
            array[...] = 0
        name = SegmentName(0, GRID, bytes(32), bytes(32))
        self.decode(self.encode(name, ids, kv, profile), name, ids)

    def encode(self, name: SegmentName, ids: Sequence[int], kv: KV, profile: AnyProfile | None = None) -> bytes:
        """The payload of a segment with these token ids. profile: by default one measured on `kv`, and kept in it."""
        llm = self._llm
        return encode(
            kv,
            dtype=llm.kv_cache.dtype,
            rope=llm.rope,
            start=name.start,
            token_ids=ids,
            model=self._identity,
            numerics=llm.runner.decoder.numerics,
            metadata=name.digest,
            profile=profile,
        )

    def decode(self, data: bytes, name: SegmentName, ids: Sequence[int]) -> tuple[KV, str]:
        """(K and V, predictor) of the segment `name`, whose token ids are `ids`.

        Raises SegmentError for bytes that are damaged, another segment's, another model's, or of other arithmetic, and
        ProfileMissingError for those whose profile is not kept here.
        """
        config = self._llm.config
        if len(data) > self._llm.kv_cache.bytes_per_token * len(ids) * 2 + _SPARE:
            raise SegmentError(f"{name.key} has {len(data)} bytes, more than {len(ids)} tokens can take")
        reader = SessionReader(data, name.key)
        reader.require(
            model=self._identity,
            numerics=self._llm.runner.decoder.numerics,
            dtype=self._llm.kv_cache.dtype,
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope=self._llm.rope,
            start=name.start,
            tokens="ids",
        )
        # The digest speaks for the tokens before the segment, on which its K and V depend as well.
        if reader.metadata != name.digest or reader.ids is None or reader.ids.tolist() != list(ids):
            raise SegmentError(f"{name.key} holds another segment than its name says")
        self._find_profile(reader)
        if reader.coder.sequential:
            raise SegmentError(
                f"{name.key} was coded with {reader.header.predictor}, which builds on all tokens before"
            )
        return reader.read_all(), reader.header.predictor.partition("/")[0]

    def _find_profile(self, reader: SessionReader) -> None:
        header = reader.header
        if header.profile is not None:
            return
        kept = self._profiles.get(header.profile_fingerprint)
        if kept is None:
            kept = self._profiles[header.profile_fingerprint] = profile_of_session(header, reader.name, self._llm)
        reader.use(kept)
