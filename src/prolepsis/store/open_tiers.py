"""Tiers from words."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from prolepsis.errors import InputError
from prolepsis.model.memory import parse_size
from prolepsis.store.disk_tier import DiskTier
from prolepsis.store.memory_tier import MemoryTier
from prolepsis.store.tier import Tier
from prolepsis.store.tiers import Tiers

_FORMS = (
    "memory:SIZE, disk:DIRECTORY:SIZE, redis://HOST:PORT/NUMBER, or a URL that fsspec knows, s3://BUCKET/PREFIX say"
)
_OPTIONS = re.compile(r"[?#]")
_REDIS = ("redis", "rediss", "unix")
_EXTRAS = {
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "s3": "s3",
}


def open_tiers(specs: Sequence[str]) -> Tiers:
    """The tiers that `specs` name, fastest first; `Tiers.close` closes them.

    "memory:512MiB", "disk:/var/lib/prolepsis:20GiB", "redis://host:6379/0" (rediss:// and unix:// too), "s3://bucket/
    prefix", "file:///shared/directory" and whatever else fsspec has a package for. A server that does not answer is no
    error: its tier waits for it.

    Raises InputError, which names the spec, for one that means nothing or is there twice, a package that is missing,
    and a directory that cannot be used.
    """
    with ExitStack() as opened:
        tiers: list[Tier] = []
        for spec in specs:
            tier = _open(spec)
            opened.callback(tier.close)
            if tier.name in [other.name for other in tiers]:
                raise InputError(f"the store has {tier.name} twice")
            tiers.append(tier)
        opened.pop_all()
    return Tiers(tiers)


def disk_directory(spec: str) -> Path | None:
    """The directory that a disk tier's `spec` names; None for another kind of tier."""
    scheme, _, rest = spec.partition(":")
    if scheme != "disk":
        return None
    directory = rest.rpartition(":")[0]
    if not directory:
        raise InputError(f"{spec!r} is no tier of the store; write disk:DIRECTORY:SIZE")
    return Path(directory).expanduser()


def _open(spec: str) -> Tier:
    scheme, colon, rest = spec.partition(":")
    if scheme == "memory" and colon and not rest.startswith("//"):
        return MemoryTier(parse_size(rest, f"{spec!r}: the size"))
    directory = disk_directory(spec)
    if directory is not None:
        return DiskTier(directory, parse_size(rest.rpartition(":")[2], f"{spec!r}: the size"))
    if not rest.startswith("//"):
        raise InputError(f"{_without_secrets(spec)!r} is no tier of the store; write {_FORMS}")
    return _open_url(spec, scheme)


def _open_url(url: str, scheme: str) -> Tier:
    name = _without_secrets(url)
    try:
        return _kind_of(scheme)(url, name)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        advice = f"pip install 'prolepsis[{extra}]' ('.[{extra}]' in a checkout)" if extra else "install the package"
        raise InputError(f"{name!r} needs a package that is not installed ({error}); {advice}") from error
    except (ValueError, TypeError) as error:  # fsspec's file systems take what they need as arguments
        raise InputError(f"{name!r} is no tier of the store: {_reason(error, url)}") from error


def _kind_of(scheme: str) -> Callable[[str, str], Tier]:
    """Imported when asked for: the packages are optional, and slow to load."""
    if scheme in _REDIS:
        from prolepsis.store.redis_tier import RedisTier

        return RedisTier
    from prolepsis.store.remote_tier import RemoteTier

    return RemoteTier


def _without_secrets(url: str) -> str:
    """A URL to be shown: no user, no password, no options. Passwords may hold what should have been escaped in them."""
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        return url.rpartition("@")[2]
    if scheme == "file":  # has no users
        return url
    place, options = _OPTIONS.split(rest, maxsplit=1) if _OPTIONS.search(rest) else (rest, "")
    if "@" in options:  # is it a password that goes on, or an option?
        return f"{scheme}://..."
    return f"{scheme}://{place.rpartition('@')[2]}"


def _reason(error: Exception, url: str) -> str:
    """What `error` says, unless it quotes a part of a user or a password."""
    hidden = url.partition("://")[2].rpartition("@")[0]
    if any(part and part in str(error) for part in re.split(r"[:/?#@]", hidden)):
        return "in a user or a password, write : / ? # and @ as %3A %2F %3F %23 and %40"
    return str(error)
