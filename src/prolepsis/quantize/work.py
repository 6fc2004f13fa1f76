"""The work directory of a job: what is done of it, so that the same command goes on where it was stopped.

`manifest.json` says what is made of what. A file `layer-*` holds a finished layer's tensors as the output will have
them, `hidden-N.npy` the calibration's hidden states after N layers. Each file takes its name when it is whole and on
disk; a kill loses the layer that was being done and no more.
"""

import json
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.quantize.stored import Stored, write_safetensors
from prolepsis.store import replace_file

if sys.platform != "win32":
    import fcntl

_MANIFEST = "manifest.json"
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
        values: NDArray[np.float32] = np.load(self._states(of, layers), allow_pickle=False)
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
        files = [self._file("errors", layer).read_text("utf-8") for layer in range(count)]
        return {name: values for text in files for name, values in json.loads(text).items()}

    def layers(self, count: int) -> tuple[list[Stored], list[dict[str, Any]]]:
        """The tensors of `count` finished layers, mapped from disk, and what is to be told of them."""
        tensors, report = [], []
        for layer in range(count):
            path = self._file("layer", layer)
            header, begin = _header(path)
            report += json.loads(header.pop("__metadata__")[_REPORT])
            data = np.memmap(path, np.uint8, "r", begin)
            tensors += [
                Stored(name, entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
                for name, entry in header.items()
            ]
        return tensors, report

    def _finished(self, of: str, states: str | None) -> int:
        done = 0
        while self._file(of, done).exists():
            done += 1
        while states and done and not self._states(states, done).exists():
            done -= 1
        return done

    def _keep_states(self, of: str, layer: int, hidden: NDArray[np.float32]) -> None:
        with replace_file(self._states(of, layer + 1)) as file:
            np.save(file, hidden, allow_pickle=False)
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
    use, one that is none, or where it cannot be made.
    """
    if restart and (path / _MANIFEST).exists():
        shutil.rmtree(path)
    try:
        path.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise InputError(f"{path} cannot be made: there is no directory {path.parent}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror}") from error
    file = path / _MANIFEST
    if not file.exists():
        if any(path.iterdir()):
            raise InputError(f"{path} holds something else; move it away, or give another -o")
        with replace_file(file) as new:
            new.write(json.dumps(manifest, indent=1).encode())
    with file.open("rb") as held:
        _lock(held, path)
        _check(path, json.load(held), manifest)
        yield Work(path)


def _lock(file: BinaryIO, path: Path) -> None:
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{path}: another process is at work there; wait for it, or give another -o") from error
        except OSError:
            pass  # some file systems have no locks; then nobody has


def _check(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if found == json.loads(json.dumps(wanted)):
        return
    keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    raise InputError(
        f"{path} was begun by another command: it differs in {', '.join(keys)}; repeat that command to go on with it, "
        "or add --restart to throw it away"
    )


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file of `write_safetensors`, and where its tensors begin."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(size)), 8 + size
