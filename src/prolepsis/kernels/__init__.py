"""Arrays in, arrays out: the compiled kernels.

Numba keeps compiled code between processes, and finds it by the place and time of a kernel's own file: it notices no
edits in the files of the functions that it calls. So the cache directory is named after a hash of every kernel's
source; and of their places and times, so that its being filled says that this installation need not compile.
"""

import atexit
import os
import shutil
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp

import numba
from numba import config
from platformdirs import user_cache_dir


def _cache_directory() -> str:
    digest = blake2b(numba.__version__.encode(), digest_size=8)
    for source in sorted(Path(__file__).resolve().parent.glob("*.py")):
        digest.update(f"{source} {source.stat().st_mtime_ns}".encode())
        digest.update(source.read_bytes())
    base = os.environ.get("PROLEPSIS_CACHE") or user_cache_dir("prolepsis")
    directory = Path(base).expanduser() / "kernels" / digest.hexdigest()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        # No place to keep compiled code. It is loaded as code, so a guessable place others can write to is none either.
        directory = Path(mkdtemp(prefix="prolepsis-kernels-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return str(directory)


if not os.environ.get("NUMBA_CACHE_DIR"):
    config.CACHE_DIR = _cache_directory()


def compiled_before() -> bool:
    """Whether a process has compiled this installation's decoder before, so that it need only be loaded."""
    return next(Path(config.CACHE_DIR).rglob("forward.run_pass-*.nbi"), None) is not None
