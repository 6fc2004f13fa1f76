"""Arrays in, arrays out: the compiled kernels.

Numba keeps compiled code between processes, but its index notices only edits in a kernel's own file, not in the
files of the functions it calls. So the cache directory is named after a hash of every kernel's source.
"""

import os
from hashlib import blake2b
from pathlib import Path

import numba
from numba import config
from platformdirs import user_cache_dir


def _cache_directory() -> str:
    digest = blake2b(numba.__version__.encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = os.environ.get("PROLEPSIS_CACHE") or user_cache_dir("prolepsis")
    return str(Path(base) / "kernels" / digest.hexdigest())


if not os.environ.get("NUMBA_CACHE_DIR"):
    config.CACHE_DIR = _cache_directory()


def compiled_before() -> bool:
    """Whether a process on this machine has compiled the decoder before, so that it need only be loaded."""
    return next(Path(config.CACHE_DIR).rglob("forward.run_pass-*.nbi"), None) is not None
