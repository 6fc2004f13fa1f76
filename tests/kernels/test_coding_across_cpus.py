"""What one x86 CPU coded, every other one reads: written and read with the kernels of lesser CPUs."""

import shutil

import pytest
from instruction_set_probe import HOST, PROBE, hash_of, result_hash, values_of_files, write_files, write_profiles
from lesser_cpus import CPUS, hash_on, only_on_x86

from prolepsis.coding.threads import limited_to

pytestmark = only_on_x86


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where kernels compiled for lesser CPUs are kept: each is compiled once for each CPU."""
    return tmp_path_factory.mktemp("cache")


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
