"""A tier on anything that fsspec has a file system for: S3 and its like, a shared directory."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from prolepsis.errors import TierDamagedError, TierError, TierTimeoutError
from prolepsis.store.bounded_calls import BoundedCalls
from prolepsis.store.frame import HEADER_BYTES, LARGEST_FRAME, header_of, unframed
from prolepsis.store.tier import Usage, is_key, path_of

_SECONDS = 15.0  # for one call


class RemoteTier:
    """Entries as objects below `url`. Nothing is evicted and there is no budget; the bucket's own rules may do that.

    Implements PinningTier: what is there stays there. Several processes may share it; an object is written as a whole
    by object stores, and by renaming in a directory of this machine. `name`: the URL without user and password. Raises
    ImportError or ValueError for a kind of URL that no installed package knows.
    """

    kind = "remote"

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        # Listings that are kept would not show what other processes put.
        self._files, path = url_to_fs(url, use_listings_cache=False)
        self._root = path.rstrip("/")
        self._call = BoundedCalls(name, _SECONDS)

    def put(self, key: str, data: bytes) -> None:
        """As `Tier.put`."""
        frame = header_of(key, data) + data
        with self._errors():
            try:
                self._call(self._write, self._path(key), frame)
            except FileNotFoundError:  # object stores have no directories, others want them
                self._call(self._files.makedirs, self._path(key).rpartition("/")[0], exist_ok=True)
                self._call(self._write, self._path(key), frame)

    def get(self, key: str) -> bytes | None:
        """As `Tier.get`."""
        with self._errors():
            try:
                frame = self._call(self._files.cat_file, self._path(key), start=0, end=LARGEST_FRAME)
            except FileNotFoundError:
                return None
        try:
            return unframed(key, frame)
        except TierDamagedError:
            self.delete(key)
            raise

    def size(self, key: str) -> int | None:
        """As `Tier.size`."""
        with self._errors():
            try:
                size: int = self._call(self._files.info, self._path(key))["size"] - HEADER_BYTES
            except FileNotFoundError:
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
                return
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
        """Nothing to give back: fsspec shares its connections."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{path_of(key)}"

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
