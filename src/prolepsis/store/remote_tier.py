"""A tier on anything that fsspec has a file system for: S3 and its like, a shared directory."""

import errno
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from prolepsis.errors import TierError, TierTimeoutError
from prolepsis.store.bounded_calls import BoundedCalls
from prolepsis.store.frame import HEADER_BYTES, LARGEST_FRAME, header_of, unframed_or_deleted
from prolepsis.store.tier import Usage, is_key, path_of

_SECONDS = 15.0  # for one call
_S3 = ("s3", "s3a")
# Once more, for connections that died meanwhile. Left to themselves, s3fs and botocore ask a dead server 25 times.
_S3_RETRIES = {"total_max_attempts": 2}


class RemoteTier:
    """Entries as objects below `url`. Nothing is evicted and there is no budget; the bucket's own rules may do that.

    Implements PinningTier: what is there stays there. Several processes may share it; an object is written as a whole
    by object stores, and by renaming in a directory of this machine. `name`: the URL without user and password. Raises
    ImportError for a kind of URL whose package is missing, and ValueError for a URL that means nothing.
    """

    kind = "remote"

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._files, path = _opened(url)
        self._root = path.rstrip("/")
        # Paths in object stores begin with a bucket, which only its owner should make; others with a slash.
        has_directories = path.startswith("/") or isinstance(self._files, LocalFileSystem)
        self._bucket = "" if has_directories else path.partition("/")[0]
        self._bucket_seen = has_directories
        self._call = BoundedCalls(name, _SECONDS)

    def put(self, key: str, data: bytes) -> None:
        """As `Tier.put`."""
        frame = header_of(key, data) + data
        with self._errors():
            try:
                self._call(self._write, self._path(key), frame)
            except FileNotFoundError:
                self._bucket_seen = not self._bucket
                self._require_bucket()
                self._call(self._files.makedirs, self._path(key).rpartition("/")[0], exist_ok=True)
                self._call(self._write, self._path(key), frame)

    def get(self, key: str) -> bytes | None:
        """As `Tier.get`."""
        with self._errors():
            try:
                frame = self._frame(self._path(key))
            except FileNotFoundError:
                self._require_bucket()
                return None
        return unframed_or_deleted(key, frame, self.delete)

    def size(self, key: str) -> int | None:
        """As `Tier.size`."""
        with self._errors():
            try:
                size = self._length(self._path(key)) - HEADER_BYTES
            except FileNotFoundError:
                self._require_bucket()
                return None
        return size if size >= 0 else None

    def touch(self, key: str) -> None:
        """Nothing to do: nothing is evicted."""

    def delete(self, key: str) -> None:
        """As `Tier.delete`."""
        with self._errors(), suppress(FileNotFoundError):
            self._call(self._files.rm_file, self._path(key))

    def keys(self, kind: str = "") -> Iterator[str]:
        """As `Tier.keys`; they are listed at once."""
        with self._errors():
            try:
                paths = self._call(self._files.find, f"{self._root}/{kind}".rstrip("/"))
            except FileNotFoundError:
                paths = []
            if not paths:
                self._require_bucket()
        for path in paths:
            key = path.rpartition("/")[2]
            if is_key(key) and path.endswith(f"/{path_of(key)}"):
                yield key

    def pin(self, key: str) -> bool:
        """As `PinningTier.pin`."""
        return self.size(key) is not None

    def unpin(self, key: str) -> None:
        """Nothing to do."""

    def pinned(self) -> list[str]:
        """None that `unpin` would free."""
        return []

    def usage(self) -> Usage:
        """Nothing: only a full listing would tell."""
        return Usage(None, None, None)

    def close(self) -> None:
        """Nothing to give back: connections end with the process."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{path_of(key)}"

    def _length(self, path: str) -> int:
        return self._call(self._files.info, path)["size"]

    def _frame(self, path: str) -> bytes:
        """What is there, up to the longest that may be."""
        try:
            return self._call(self._files.cat_file, path, start=0, end=LARGEST_FRAME)
        except OSError as error:  # S3 refuses to give a part of nothing
            if error.errno == errno.EINVAL and not self._length(path):
                return b""
            raise

    def _require_bucket(self) -> None:
        """Raise TierError where there is not even a bucket. Once it was seen, only a failed put asks again."""
        if self._bucket_seen:
            return
        try:
            self._call(self._files.info, self._bucket)
        except FileNotFoundError:
            raise TierError(f"{self.name}: there is no bucket {self._bucket!r}: create it") from None
        except PermissionError:
            pass  # it is there, and may not be listed
        self._bucket_seen = True

    def _write(self, path: str, frame: bytes) -> None:
        if not isinstance(self._files, LocalFileSystem):
            self._files.pipe_file(path, frame)
            return
        unfinished = f"{path}.{secrets.token_hex(4)}.part"
        try:
            self._files.pipe_file(unfinished, frame)
            self._files.mv(unfinished, path)
        except BaseException:
            with suppress(OSError):
                self._files.rm_file(unfinished)
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TierError:
            raise
        except TimeoutError as error:
            raise TierTimeoutError(f"{self.name}: {error}") from error
        except Exception as error:  # each file system's package has errors of its own
            raise TierError(f"{self.name}: {type(error).__name__}: {error}") from error


def _opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    scheme = urlsplit(url).scheme
    if scheme in _S3:
        _check_s3(url)
    # Listings that are kept would not show what other processes put.
    files, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    if scheme in _S3:
        files.retries = 1
        files.config_kwargs = {"retries": _S3_RETRIES} | files.config_kwargs
    return files, path


def _check_s3(url: str) -> None:
    """Raise ValueError for what s3fs would take for parts of names."""
    parts = urlsplit(url)
    if not parts.netloc:
        raise ValueError("it names no bucket")
    if "@" in parts.netloc or (":" in parts.netloc and "@" in url):  # a slash in a password ends the netloc
        raise ValueError("credentials come from the environment or ~/.aws, not from the URL")
    if parts.query or parts.fragment:
        raise ValueError("a URL of S3 has no ? and no #: options come from the environment or ~/.config/fsspec")
