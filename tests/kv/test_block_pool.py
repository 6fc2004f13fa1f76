import pytest

from prolepsis.errors import CapacityError, IntegrityError
from prolepsis.kv.block_pool import BlockPool


def used_pool(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks)
    for _ in range(num_blocks):
        pool.allocate()
    return pool


def test_every_block_is_handed_out_once_and_then_the_pool_says_it_is_empty():
    pool = BlockPool(5)
    assert [pool.allocate() for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(CapacityError, match="0 of 5 are free"):
        pool.allocate()
    pool.check()
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_memory_that_was_used_is_used_again_before_memory_that_was_not():
    pool = BlockPool(6)
    for _ in range(4):
        pool.allocate()
    for block in (2, 0, 3, 1):
        pool.release(block)
    assert [pool.allocate() for _ in range(6)] == [1, 3, 0, 2, 4, 5]


def test_a_shared_block_is_freed_by_its_last_holder():
    pool = used_pool(1)
    pool.hold(0)
    pool.release(0)
    assert (pool.num_free, pool.ref_count(0)) == (0, 1)
    pool.release(0)
    assert (pool.num_free, pool.ref_count(0)) == (1, 0)
    pool.check()


def test_registered_blocks_are_evicted_after_all_blank_ones_and_those_released_longest_ago_first():
    pool = used_pool(5)
    told: list[int] = []
    pool.on_forget = told.append
    for block in (4, 1, 3):
        pool.register(block)
    for block in (0, 3, 1, 4, 2):
        pool.release(block)
    assert pool.num_free == 5
    assert pool.eviction_order() == [3, 1, 4]
    pool.hold(1)
    pool.release(1)
    assert pool.eviction_order() == [3, 4, 1]
    assert ([pool.allocate(), pool.allocate()], told) == ([2, 0], [])
    assert [(pool.allocate(), list(told)) for _ in range(3)] == [(3, [3]), (4, [3, 4]), (1, [3, 4, 1])]
    assert not any(map(pool.is_registered, range(5)))
    pool.check()


def test_a_free_registered_block_can_be_held_and_stays_registered():
    pool = used_pool(2)
    pool.register(0)
    pool.release(0)
    pool.hold(0)
    assert (pool.num_free, pool.ref_count(0), pool.is_registered(0)) == (0, 1, True)
    with pytest.raises(CapacityError):
        pool.allocate()
    pool.check()


def test_writable_is_what_one_sequence_holds_and_the_index_does_not_know():
    pool = used_pool(3)
    pool.hold(0)
    pool.register(1)
    assert [pool.is_writable(block) for block in range(3)] == [False, False, True]
    pool.release(2)
    assert not pool.is_writable(2)
    pool.forget(1)
    assert pool.is_writable(1)


def test_a_forgotten_block_is_blank_once_it_is_free():
    pool = used_pool(3)
    for block in (0, 1):
        pool.register(block)
    pool.release(0)
    pool.forget(0)
    pool.forget(1)
    pool.check()
    assert (pool.num_free, pool.eviction_order()) == (1, [])
    for operation in (pool.forget, pool.hold):
        with pytest.raises(IntegrityError, match="block 0 is "):
            operation(0)


@pytest.mark.parametrize("block", [-1, 0, 3])
def test_free_and_foreign_blocks_are_refused(block):
    pool = BlockPool(3)
    for operation in (pool.hold, pool.release, pool.register, pool.forget):
        with pytest.raises(IntegrityError, match=f"block {block} "):
            operation(block)
    pool.check()


def test_a_block_is_registered_once():
    pool = used_pool(1)
    pool.register(0)
    with pytest.raises(IntegrityError, match="registered already"):
        pool.register(0)


@pytest.mark.parametrize(
    ("count", "registered", "lists", "message"),
    [
        (-1, False, "", "negative"),
        (1, False, "blank", "free and yet held"),
        (1, True, "evictable", "free and yet held"),
        (0, True, "blank", "registered and yet blank"),
        (0, False, "evictable", "is not registered"),
        (0, False, "blank blank", "twice"),
        (0, False, "", "but the pool has 2"),
    ],
)
def test_check_names_what_is_wrong(count, registered, lists, message):
    pool = BlockPool(2)
    block = pool.allocate()
    pool._ref_counts[block], pool._registered[block] = count, registered
    for name in lists.split():
        if name == "blank":
            pool._blank.append(block)
        else:
            pool._evictable[block] = None
    with pytest.raises(IntegrityError, match=message):
        pool.check()


def test_arrays_tell_of_each_block_what_methods_do():
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(3)]
    pool.hold(blocks[1])
    pool.register(blocks[2])
    assert pool.ref_counts.tolist() == [pool.ref_count(block) for block in range(5)] == [1, 2, 1, 0, 0]
    assert pool.registered.tolist() == [pool.is_registered(block) for block in range(5)]
    assert pool.registered.tolist() == [False, False, True, False, False]
