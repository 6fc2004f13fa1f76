"""Kernels compiled for lesser x86 CPUs, in processes of their own."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.codegen import get_host_cpu_features

SCRIPT = Path(__file__).with_name("instruction_set_probe.py")
SOURCE = Path(__file__).parents[2] / "src"

_SSE2 = "sse sse2 mmx cmov cx8 fxsr 64bit"
_SSE4 = f"{_SSE2} sse3 ssse3 sse4.1 sse4.2 popcnt cx16"
_AVX2 = f"{_SSE4} avx avx2 fma f16c bmi bmi2 lzcnt movbe xsave"
CPUS = {  # LLVM's name of a CPU, and the features to compile for
    "generic": "",  # nothing known at all
    "x86-64": _SSE2,
    "nehalem": _SSE4,
    "haswell": _AVX2,
    "alderlake": f"{_AVX2} avxvnni",
    "skylake-avx512": f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl",
}

only_on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instruction sets of x86")


def hash_on(cpu, length, directory, cache, **more):
    """What the script prints, in an environment with `more`."""
    features = CPUS[cpu].split()
    host = {name[1:] for name in get_host_cpu_features().split(",") if name.startswith("+")}
    if missing := set(features) - host:
        pytest.skip(f"this machine lacks {', '.join(sorted(missing))}")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in features),
        "PROLEPSIS_CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        **more,
    }
    command = [sys.executable, str(SCRIPT), length, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
