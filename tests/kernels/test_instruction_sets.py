"""Products and attention have the same bits on every x86 CPU."""

import pytest
from instruction_set_probe import result_hash
from lesser_cpus import CPUS, hash_on, only_on_x86

pytestmark = only_on_x86


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where kernels compiled for lesser CPUs are kept: each is compiled once for each CPU."""
    return tmp_path_factory.mktemp("cache")


def test_products_and_attention(tmp_path, cache):
    """With AVX2 alone; `test_coding_across_cpus` has those of twins with SSE2."""
    assert hash_on("haswell", "short", tmp_path, cache) == result_hash("short", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", [cpu for cpu in CPUS if cpu != "haswell"])
def test_products_and_attention_on_every_cpu(cpu, tmp_path, cache):
    assert hash_on(cpu, "short", tmp_path, cache) == result_hash("short", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", CPUS)
def test_products_of_every_kind(cpu, tmp_path, cache):
    assert hash_on(cpu, "kinds", tmp_path, cache) == result_hash("kinds", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", CPUS)
def test_a_whole_model(cpu, tmp_path, cache):
    assert hash_on(cpu, "whole", tmp_path, cache) == result_hash("whole", tmp_path)
