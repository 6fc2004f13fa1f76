"""What the store keeps of a saved conversation beside its K and V."""

from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from prolepsis.errors import InputError, SegmentError

MAX_BYTES = 1 << 25
"""Of a manifest."""
MAX_ID = 256
"""Characters of a session's id."""

_Size = Annotated[int, Meta(ge=0, le=1 << 50)]


class StoredPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A segment of a session: its key in the store, tokens, and bytes there."""

    key: Annotated[str, Meta(pattern=r"^kv-[0-9a-f]{64}\Z")]
    tokens: _Size
    coded_bytes: _Size


class StoredSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A saved conversation.

    messages: as they were given. tokens: ids of all of it. parts: the segments that hold its K and V, in order.
    raw_bytes: of K and V in the pool; coded_bytes: in the store. model: identity of the model, part by part. created:
    Unix time. pinned: whether a tier has promised to keep all parts until the session is deleted.
    cache_salt: of the requests that it comes from.
    """

    version: Literal[1]
    owner: str
    id: Annotated[str, Meta(max_length=MAX_ID)]
    created: float
    model: dict[str, str]
    messages: list[dict[str, Any]]
    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 31)]]
    parts: list[StoredPart]
    raw_bytes: _Size
    pinned: bool
    cache_salt: str

    @property
    def coded_bytes(self) -> int:
        """Of all parts."""
        return sum(part.coded_bytes for part in self.parts)

    @property
    def summary(self) -> "SessionSummary":
        """Without messages and tokens."""
        keys = tuple(part.key for part in self.parts)
        return SessionSummary(
            self.owner, self.id, self.created, len(self.tokens), len(self.messages), self.raw_bytes, self.coded_bytes,
            self.pinned, self.model, keys,
        )  # fmt: skip


class SessionSummary(msgspec.Struct, frozen=True):
    """What a list of sessions tells of each. tokens, messages: how many. keys: of its parts in the store."""

    owner: str
    id: str
    created: float
    tokens: int
    messages: int
    raw_bytes: int
    coded_bytes: int
    pinned: bool
    model: dict[str, str]
    keys: tuple[str, ...]


def key_of(owner: str, session_id: str) -> str:
    """Where a session's manifest lies. Raises InputError for an id that is none."""
    if not isinstance(session_id, str) or not 1 <= len(session_id) <= MAX_ID:
        raise InputError(f"a session's id is a text of 1 to {MAX_ID} characters, not {session_id!r:.80}")
    named = b"".join(_framed(text) for text in (owner, session_id))
    return f"session-{blake2b(named, digest_size=32).hexdigest()}"


def pack(session: StoredSession) -> bytes:
    """The manifest. Raises InputError for a session too large, or with messages that JSON cannot hold."""
    try:
        data = msgspec.json.encode(session)
    except (TypeError, ValueError) as error:
        raise InputError(f"messages cannot be stored: {error}") from error
    if len(data) > MAX_BYTES:
        raise InputError(f"the session takes {len(data)} bytes without K and V, at most {MAX_BYTES} are stored")
    return data


def unpack(data: bytes, key: str) -> StoredSession:
    """The inverse of `pack`, of what lies under `key`. Raises SegmentError for what is no manifest, or another's."""
    if len(data) > MAX_BYTES:
        raise SegmentError(f"{key} has {len(data)} bytes, more than a session takes")
    try:
        session = msgspec.json.decode(data, type=StoredSession)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SegmentError(f"{key} is not the manifest of a session: {error}") from error
    if not session.id or key_of(session.owner, session.id) != key:
        raise SegmentError(f"{key} holds the manifest of another session")
    return session


def _framed(text: str) -> bytes:
    packed = text.encode("utf-8", "surrogatepass")
    return len(packed).to_bytes(8, "little") + packed
