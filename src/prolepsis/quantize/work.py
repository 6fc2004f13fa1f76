"""The work directory of a job: what is done of it, so that the same command goes on where it was stopped.

`manifest.json` says what is made of what; `lock` is locked by the process at work. A file `layer-*` holds a finished
layer's tensors as the output will have them, `hidden-N.npy` the calibration's hidden states after N layers. Each file
takes its name when it is whole and on disk; a kill loses the layer that was being done and no more.
"""

import json
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.quantize.stored import Stored, write_safetensors
from prolepsis.store import BusyError, lock_file, replace_file

_MANIFEST, _LOCK, _MADE = "manifest.json", "lock", "model"
_OWN = re.compile(rf"(layer|errors)-\d{{5}}|(hidden|measured)-\d+\.npy|manifest\.json|{_LOCK}|{_MADE}|\..*\.part")
_REPORT = "report"


class Work:
    """Finished layers and hidden states on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def finished_layers(self, with_hidden: bool) -> int:
        """How many layers need not be done again."""
        return self._finished("layer", "hidden" if with_hidden else None)

    def measured_layers(self) -> int:
        """How many layers need not be measured again."""
        return self._finished("errors", "measured")

    def hidden(self, layers: int, of: str = "hidden") -> NDArray[np.float32]:
        """The hidden states after so many layers, of the walk that quantises or ("measured") of that before it."""
        place = self._states(of, layers)
        try:
            values: NDArray[np.float32] = np.load(place, allow_pickle=False)
        except (ValueError, EOFError):
            raise _damaged(place) from None
        return values

    def keep_layer(
        self,
        layer: int,
        tensors: Sequence[Stored],
        report: Sequence[Mapping[str, Any]],
        hidden: NDArray[np.float32] | None,
    ) -> None:
        """Save a finished layer. report: what is to be told of it at the end. Raises InputError for a full disk."""
        with replace_file(self._file("layer", layer)) as file:
            write_safetensors(file, tensors, {_REPORT: json.dumps(report)})
        if hidden is not None:
            self._keep_states("hidden", layer, hidden)

    def keep_errors(self, layer: int, errors: Mapping[str, Sequence[float]], hidden: NDArray[np.float32]) -> None:
        """Save what was measured of a layer."""
        with replace_file(self._file("errors", layer)) as file:
            file.write(json.dumps(errors).encode())
        self._keep_states("measured", layer, hidden)

    def errors(self, count: int) -> dict[str, list[float]]:
        """What was measured of `count` layers."""
        out: dict[str, list[float]] = {}
        for layer in range(count):
            place = self._file("errors", layer)
            try:
                out |= json.loads(place.read_bytes())
            except (ValueError, TypeError):
                raise _damaged(place) from None
        return out

    def layers(self, count: int) -> tuple[list[Stored], list[dict[str, Any]]]:
        """The tensors of `count` finished layers, mapped from disk, and what is to be told of them."""
        tensors, report = [], []
        for layer in range(count):
            path = self._file("layer", layer)
            header, begin = _header(path)
            report += json.loads(header.pop("__metadata__")[_REPORT])
            data = np.memmap(path, np.uint8, "r", begin)
            tensors += [
                Stored.held(name, entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
                for name, entry in header.items()
            ]
        return tensors, report

    @property
    def made(self) -> Path:
        """Where the whole output is put together."""
        return self.path / _MADE

    def remove(self) -> None:
        """Delete it all, as the job is done. Where that fails, the next job there does it."""
        with suppress(OSError):
            _clear(self.path)
            (self.path / _LOCK).unlink()
            self.path.rmdir()

    def _finished(self, of: str, states: str | None) -> int:
        done = 0
        while self._file(of, done).exists():
            done += 1
        while states and done and not self._states(states, done).exists():
            done -= 1
        return done

    def _keep_states(self, of: str, layer: int, hidden: NDArray[np.float32]) -> None:
        with replace_file(self._states(of, layer + 1)) as file:
            # `np.save` would not say why a file could not be written.
            write_array_header_1_0(file, header_data_from_array_1_0(hidden))
            file.write(np.ascontiguousarray(hidden).data)
        with suppress(FileNotFoundError):
            self._states(of, layer).unlink()

    def _file(self, of: str, layer: int) -> Path:
        return self.path / f"{of}-{layer:05d}"

    def _states(self, of: str, layers: int) -> Path:
        return self.path / f"{of}-{layers}.npy"


@contextmanager
def work_directory(path: Path, manifest: Mapping[str, Any], restart: bool) -> Iterator[Work]:
    """The work directory at `path`, made or gone on with; nobody else uses it meanwhile.

    restart: throw away what another command left there. Raises InputError for one of another manifest, one that is in
    use or damaged, one that holds something else, or where it cannot be made.
    """
    try:
        path.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise InputError(f"{path} cannot be made: there is no directory {path.parent}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror}") from error
    _require_own(path)
    with _locked(path):
        _require_own(path)
        if restart:
            _clear(path)
        if not (path / _MANIFEST).exists():
            with replace_file(path / _MANIFEST) as new:
                new.write(json.dumps(manifest, indent=1).encode())
        _check(path, manifest)
        yield Work(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock is a file of its own: the manifest may be replaced."""
    place = path / _LOCK
    try:
        file = place.open("ab")
    except OSError as error:
        raise InputError(f"{place} cannot be made: {error.strerror}") from error
    with file:
        try:
            lock_file(file, place)
        except BusyError:
            raise InputError(f"{path}: another process is at work there; wait for it, or give another -o") from None
        yield


def _require_own(path: Path) -> None:
    """Raise InputError for a directory that holds what no job leaves: it would be removed at the end."""
    if path.is_symlink():
        raise InputError(f"{path} is a link; move it away, or give another -o")
    names = {entry.name for entry in path.iterdir()}
    strange = sorted(name for name in names if not _OWN.fullmatch(name))
    if not strange and _MANIFEST not in names:
        strange = sorted(name for name in names if name != _LOCK and not name.startswith(f".{_MANIFEST}."))
    if strange:
        raise InputError(f"{path} holds something else ({strange[0]}); move it away, or give another -o")


def _clear(path: Path) -> None:
    """Delete all but the lock; the manifest goes last, as it says that what is left is a job's."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == _MANIFEST):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _check(path: Path, wanted: Mapping[str, Any]) -> None:
    """Raise InputError unless the work at `path` is of the job `wanted`."""
    try:
        found = json.loads((path / _MANIFEST).read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _damaged(path / _MANIFEST)
    if found == json.loads(json.dumps(wanted)):
        return
    keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    raise InputError(
        f"{path} was begun by another command: it differs in {', '.join(keys)}; repeat that command to go on with it, "
        "or add --restart to throw it away"
    )


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file of `write_safetensors`, and where its tensors begin. InputError unless it is whole."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError):
        raise _damaged(path) from None
    if 8 + size + max(ends, default=0) != path.stat().st_size:
        raise _damaged(path)
    return header, 8 + size


def _damaged(path: Path) -> InputError:
    return InputError(f"{path} is damaged; add --restart to throw away what is done there")
