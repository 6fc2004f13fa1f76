import pytest

from prolepsis.errors import CapacityError, IntegrityError
from prolepsis.kv.block_pool import BlockPool


def test_every_block_is_handed_out_once_and_then_the_pool_says_it_is_empty():
    pool = BlockPool(5)
    assert sorted(pool.allocate() for _ in range(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(CapacityError, match="0 of 5 are free"):
        pool.allocate()
    pool.check()
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_the_block_released_first_is_reused_first():
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(4)]
    for index in (2, 0, 3, 1):
        pool.release(blocks[index])
    assert [pool.allocate() for _ in range(4)] == [blocks[index] for index in (2, 0, 3, 1)]


def test_a_shared_block_is_freed_by_its_last_holder():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.num_free, pool.ref_count(block)) == (0, 1)
    pool.release(block)
    assert (pool.num_free, pool.ref_count(block)) == (1, 0)
    pool.check()


@pytest.mark.parametrize("block", [-1, 0, 3])
def test_free_and_foreign_blocks_are_refused(block):
    pool = BlockPool(3)
    for operation in (pool.share, pool.release):
        with pytest.raises(IntegrityError, match=f"block {block} "):
            operation(block)
    pool.check()


@pytest.mark.parametrize(
    ("count", "freed", "message"),
    [(-1, True, "negative"), (1, True, "free and yet held"), (0, False, "but the pool has 2")],
)
def test_check_names_what_is_wrong(count, freed, message):
    pool = BlockPool(2)
    block = pool.allocate()
    pool._ref_counts[block] = count
    if freed:
        pool._free[block] = None
    with pytest.raises(IntegrityError, match=message):
        pool.check()
