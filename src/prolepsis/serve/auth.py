"""API keys: who asks. A key is compared and kept as its hash only, and stands in no log and no error."""

import hmac
import os
import stat
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from prolepsis.errors import InputError
from prolepsis.serve.asgi import header, refuse
from prolepsis.serve.errors import APIError

KEY_VARIABLE = "PROLEPSIS_API_KEY"
OPEN_PATHS = frozenset({"/", "/favicon.ico", "/health", "/version", "/metrics"})
"""What anyone may ask for, besides the page's files ..."""
OPEN_PREFIX = "/web/"
"""... which lie here."""
_MOST_KEYS, _LONGEST_KEY = 10_000, 512


class Tenant(NamedTuple):
    """Whoever shares a key. `owner` is the hash of the key; empty where the server has none."""

    owner: str = ""

    def cache_salt(self, wanted: str | None) -> str:
        """The salt of a request's blocks: nobody without the same key and the same wanted salt shares them."""
        if not self.owner:
            return wanted or ""
        return blake2b((wanted or "").encode("utf-8", "surrogatepass"), key=bytes.fromhex(self.owner)).hexdigest()


def tenant_of(request: Request) -> Tenant:
    """Who sent a request."""
    tenant = request.scope.get("state", {}).get("tenant", Tenant())
    assert isinstance(tenant, Tenant)
    return tenant


def read_keys(given: Iterable[str], file: str | os.PathLike[str] | None) -> tuple[str, ...]:
    """All keys: those given, one a line of `file` (but empty lines and #comments), and $PROLEPSIS_API_KEY.

    Raises InputError, which names no key, for one that no header can carry, and for a file that cannot be read.
    """
    keys = [("--api-key", key) for key in given]
    if file is not None:
        keys += [(f"{os.fspath(file)}, line {number}", key) for number, key in _lines(Path(file))]
    if os.environ.get(KEY_VARIABLE):
        keys.append((KEY_VARIABLE, os.environ[KEY_VARIABLE]))
    for where, key in keys:
        if not 8 <= len(key) <= _LONGEST_KEY or not all("!" <= character <= "~" for character in key):
            raise InputError(
                f"{where}: an API key has 8 to {_LONGEST_KEY} printable ASCII characters without spaces "
                "(make one with `openssl rand -hex 24`)"
            )
    if len(keys) > _MOST_KEYS:
        raise InputError(f"{len(keys)} API keys, at most {_MOST_KEYS} are allowed")
    return tuple(dict.fromkeys(key for _, key in keys))


def is_readable_by_others(file: str | os.PathLike[str]) -> bool:
    """Whether other users of this machine may read a file of keys.

    For a file of systemd's credentials the bits of the group are the mask of its ACL, and give the group nothing.
    """
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    is_credential = credentials is not None and Path(file).parent == Path(credentials)
    return bool(os.stat(file).st_mode & (stat.S_IROTH if is_credential else stat.S_IRGRP | stat.S_IROTH))


def _lines(file: Path) -> list[tuple[int, str]]:
    try:
        lines = file.read_text("ascii").splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise InputError(f"--api-key-file: {file} cannot be read: {why}") from None
    stripped = [(number, line.strip()) for number, line in enumerate(lines, start=1)]
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]


def owner_of(key: str) -> str:
    """The hash that stands for a key, 64 hexadecimal digits."""
    return blake2b(key.encode(), digest_size=32, person=b"prolepsis-owner").hexdigest()


class Auth:
    """Lets through requests to open paths, and those with one of the keys, whose tenant it notes."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._owners = [owner_of(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = self._tenant(scope)
            if tenant is None:
                await refuse(_no_key(), scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant | None:
        if not self._owners or is_open(scope["path"]):
            return Tenant()
        scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
        owner = owner_of(key.strip(" "))
        # All are compared, whichever is found: the time tells nothing.
        known = sum([hmac.compare_digest(owner, each) for each in self._owners])
        return Tenant(owner) if known and scheme.lower() == "bearer" else None


def _no_key() -> APIError:
    return APIError(
        401,
        "a valid API key is needed: send the header `Authorization: Bearer KEY`",
        code="invalid_api_key",
        headers={"WWW-Authenticate": 'Bearer realm="prolepsis"'},
    )


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)
