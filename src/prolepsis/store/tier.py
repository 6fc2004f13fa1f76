"""What a tier is: bytes under keys, five verbs. It knows nothing of tokens or of KV."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from prolepsis.errors import InputError

_KEY = re.compile(r"[a-z]{1,16}-[0-9a-f]{64}")


def is_key(text: str) -> bool:
    """Whether `check_key` would let it pass."""
    return _KEY.fullmatch(text) is not None


def check_key(key: str) -> None:
    """Raise InputError unless `key` is a kind (lower-case letters), a hyphen and 64 hexadecimal digits.

    A key that passes is safe as a file name, as part of a URL and in a pattern of Redis.
    """
    if not is_key(key):
        raise InputError(f"{key[:100]!r} is no key of the store: write a kind in a-z, a hyphen and 64 digits of 0-9a-f")


def path_of(key: str) -> str:
    """Where tiers made of files keep `key`: kind, first two digits, key. Not checked."""
    kind, _, digits = key.partition("-")
    return f"{kind}/{digits[:2]}/{key}"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds. None: it cannot say without asking a server, or has no limit of its own."""

    entries: int | None
    bytes: int | None  # as they count against the budget
    budget: int | None
    evictions: int = 0  # since it was opened


class Tier(Protocol):
    """One place where entries live. Every method may be called from several threads at once.

    Keys have passed `check_key`. Any method may raise TierError; what it was asked for is then not done for certain.
    """

    @property
    def name(self) -> str:
        """The tier in errors and statistics, without secrets."""

    @property
    def kind(self) -> str:
        """ "memory", "disk", "redis" or "remote"."""

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`, in place of what was there. Other entries may be evicted for it.

        Raises TierFullError where there is no room.
        """

    def get(self, key: str) -> bytes | None:
        """What was last put under `key`, or None. Raises TierDamagedError, and deletes it, where it has changed."""

    def size(self, key: str) -> int | None:
        """Bytes `get` would return, or None: cheap, and no promise that they are sound."""

    def delete(self, key: str) -> None:
        """Forget `key` and its pin, if it is there."""

    def keys(self, kind: str = "") -> Iterator[str]:
        """Keys of that kind, or all, in no order, one perhaps twice; of what is put or deleted meanwhile, some."""

    def usage(self) -> Usage:
        """What it holds; no question to a server, no error."""

    def close(self) -> None:
        """Write down what is not yet, and give back files and connections. Nothing is called afterwards."""


@runtime_checkable
class PinningTier(Tier, Protocol):
    """A tier that evicts, and can promise to keep an entry.

    A pin is a mark, not a count: pinned twice, one `unpin` frees it.
    """

    def touch(self, key: str) -> None:
        """Count as a use of `key`, if it is there."""

    def pin(self, key: str) -> bool:
        """Never evict `key`; a new value under it stays pinned. False where the tier does not hold it."""

    def unpin(self, key: str) -> None:
        """Let `key` be evicted again, which counts as a use."""

    def pinned(self) -> list[str]:
        """All keys with a pin, in no order."""
