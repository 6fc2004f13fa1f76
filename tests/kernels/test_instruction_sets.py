"""The same bits on every x86 CPU: kernels compiled for lesser ones, in processes of their own."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from instruction_set_probe import result_hash
from numba.core.codegen import get_host_cpu_features

PROBE = Path(__file__).with_name("instruction_set_probe.py")
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

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instruction sets of x86")


def hash_on(cpu, length, directory):
    features = CPUS[cpu].split()
    host = {name[1:] for name in get_host_cpu_features().split(",") if name.startswith("+")}
    if missing := set(features) - host:
        pytest.skip(f"this machine lacks {', '.join(sorted(missing))}")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in features),
        "PROLEPSIS_CACHE": str(directory),
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(PROBE), length, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("cpu", ["x86-64", "haswell"])
def test_products_and_attention(cpu, tmp_path):
    assert hash_on(cpu, "short", tmp_path) == result_hash("short", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", CPUS)
def test_a_whole_model(cpu, tmp_path):
    assert hash_on(cpu, "whole", tmp_path) == result_hash("whole", tmp_path)
