"""The same bits on every x86 CPU: kernels compiled for lesser ones, in processes of their own."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from instruction_set_probe import HOST, PROBE, hash_of, result_hash, values_of_files, write_files, write_profiles
from numba.core.codegen import get_host_cpu_features

from prolepsis.coding.threads import limited_to

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

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instruction sets of x86")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where kernels compiled for lesser CPUs are kept: each is compiled once for each CPU."""
    return tmp_path_factory.mktemp("cache")


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


@pytest.mark.parametrize("cpu", ["x86-64", "haswell"])
def test_products_and_attention(cpu, tmp_path, cache):
    assert hash_on(cpu, "short", tmp_path, cache) == result_hash("short", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", CPUS)
def test_products_of_every_kind(cpu, tmp_path, cache):
    assert hash_on(cpu, "kinds", tmp_path, cache) == result_hash("kinds", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", CPUS)
def test_a_whole_model(cpu, tmp_path, cache):
    assert hash_on(cpu, "whole", tmp_path, cache) == result_hash("whole", tmp_path)


@pytest.fixture(scope="module")
def host_files(tmp_path_factory):
    """A directory with session files of this CPU, written by one thread, and the profiles they need."""
    directory = tmp_path_factory.mktemp("files")
    write_profiles(directory)
    with limited_to(1):
        write_files(directory, HOST)
    return directory


def assert_same_files(cpu, host_files, directory, cache, **more):
    """Written here and read there, written there and read here: the same bytes and the same values."""
    shutil.copytree(host_files, directory, dirs_exist_ok=True)
    values = hash_of(values_of_files(directory, HOST))
    assert hash_on(cpu, "coding", directory, cache, **more) == values
    here, there = ({path.name: path.read_bytes() for path in (directory / f).iterdir()} for f in (HOST, PROBE))
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name]] == []
    assert hash_of(values_of_files(directory, PROBE)) == values


def test_session_files(host_files, tmp_path, cache):
    """A tensor of torch is only memory to the codec: what torch computes with does not matter either."""
    assert_same_files("x86-64", host_files, tmp_path, cache, PROLEPSIS_THREADS="2", ATEN_CPU_CAPABILITY="default")


@pytest.mark.nightly
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("cpu", CPUS)
def test_session_files_on_every_cpu(cpu, threads, host_files, tmp_path, cache):
    assert_same_files(cpu, host_files, tmp_path, cache, PROLEPSIS_THREADS=threads)


def test_streams(tmp_path, cache):
    """Of shapes and predictions that no file has."""
    assert hash_on("x86-64", "streams", tmp_path, cache) == result_hash("streams", tmp_path)
