"""A tier on a server that speaks Redis' protocol."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from prolepsis.errors import TierError, TierFullError, TierTimeoutError
from prolepsis.store.frame import HEADER_BYTES, LARGEST_FRAME, header_of, unframed_or_deleted
from prolepsis.store.tier import Usage, is_key

_PREFIX = "prolepsis:"
_CONNECT_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_SCANNED = 1000  # keys the server looks at for one answer


class RedisTier:
    """Entries on the server at `url`, which evicts as its own `maxmemory` and `maxmemory-policy` say. Implements Tier.

    Nothing is asked of the server until the first entry is. Several processes may share it. `name`: the URL without
    user and password. Raises ValueError for a URL that is none.
    """

    kind = "redis"

    def __init__(self, url: str, name: str) -> None:
        _check_number(url)
        self.name = name
        self._client = redis.Redis.from_url(
            url,
            socket_connect_timeout=_CONNECT_SECONDS,
            socket_timeout=_ANSWER_SECONDS,
            # Once, and at once: connections that were open when the server was started again are all dead.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )

    def put(self, key: str, data: bytes) -> None:
        """As `Tier.put`."""
        frame = header_of(key, data) + data
        with self._errors():
            self._client.set(_PREFIX + key, frame)

    def get(self, key: str) -> bytes | None:
        """As `Tier.get`."""
        with self._errors():
            frame = self._frame(key)
        return unframed_or_deleted(key, frame, self.delete) if frame else None

    def size(self, key: str) -> int | None:
        """As `Tier.size`."""
        with self._errors():
            try:
                length = self._client.strlen(_PREFIX + key)
            except redis.exceptions.ResponseError as error:
                _require_wrong_type(error)
                return None  # what is put there next takes its place
        return length - HEADER_BYTES if length >= HEADER_BYTES else None

    def delete(self, key: str) -> None:
        """As `Tier.delete`."""
        with self._errors():
            self._client.delete(_PREFIX + key)

    def keys(self, kind: str = "") -> Iterator[str]:
        """As `Tier.keys`."""
        with self._errors():
            for name in self._client.scan_iter(match=f"{_PREFIX}{kind or '*'}-*", count=_SCANNED):
                key = name[len(_PREFIX) :].decode("ascii", "replace")
                if is_key(key):
                    yield key

    def usage(self) -> Usage:
        """Nothing: only the server knows."""
        return Usage(None, None, None)

    def close(self) -> None:
        """As `Tier.close`."""
        with self._errors():
            self._client.close()

    def _frame(self, key: str) -> bytes:
        """What the server has, up to the longest that may be; nothing if there is nothing."""
        try:
            return self._client.getrange(_PREFIX + key, 0, LARGEST_FRAME - 1)
        except redis.exceptions.ResponseError as error:
            _require_wrong_type(error)
            return b"not even bytes"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.OutOfMemoryError as error:
            raise TierFullError(f"{self.name}: {error}") from error
        except redis.TimeoutError as error:
            raise TierTimeoutError(f"{self.name}: {error}") from error
        except (redis.RedisError, OSError, ValueError) as error:  # ValueError: an answer that is not Redis' protocol
            raise TierError(f"{self.name}: {error}") from error


def _require_wrong_type(error: redis.exceptions.ResponseError) -> None:
    """Return where the server holds something else than bytes at a key of ours. Raises any other error."""
    if not str(error).startswith("WRONGTYPE"):
        raise error


def _check_number(url: str) -> None:
    """Raise ValueError for a database that is no number: the client would take number 0."""
    parts = urlsplit(url)
    number = parts.path.strip("/")
    if parts.scheme != "unix" and number and not number.isdecimal():
        raise ValueError(f"the database {number!r} is no number")
