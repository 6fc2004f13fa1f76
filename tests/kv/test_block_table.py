import numpy as np
import pytest

from prolepsis.errors import CapacityError, IntegrityError
from prolepsis.kv.block_pool import BlockPool
from prolepsis.kv.block_table import BlockTable


def test_slots_follow_the_blocks():
    table = BlockTable(BlockPool(8), block_size=4)
    table.append(3)
    table.append(6)
    slots = table.slots(0, 9)
    positions = np.arange(9)
    assert slots.tolist() == (table.blocks[positions // 4] * 4 + positions % 4).tolist()
    assert table.slots(2, 7).tolist() == slots[2:7].tolist()
    assert (table.length, table.capacity, table.blocks.dtype) == (9, 12, np.int32)


def test_the_table_outgrows_its_first_entries():
    table = BlockTable(BlockPool(200), block_size=2)
    for _ in range(397):
        table.append(1)
    table.check()
    assert len(table.blocks) == 199
    assert len(set(table.slots(0, 397).tolist())) == 397


@pytest.mark.parametrize("operation", ["reserve", "append", "prepare_write"])
def test_too_large_a_request_takes_nothing(operation):
    pool = BlockPool(3)
    table = BlockTable(pool, block_size=4)
    table.append(5)
    with pytest.raises(CapacityError, match=r"needs 2 more block\(s\) but only 1 of 3"):
        getattr(table, operation)(8)
    assert (table.length, len(table.blocks), pool.num_free) == (5, 2, 1)
    table.check()


def test_copy_on_write_that_does_not_fit_changes_nothing():
    pool = BlockPool(2)
    table = BlockTable(pool, block_size=4)
    table.append(6)
    twin = table.fork()
    with pytest.raises(CapacityError):
        twin.prepare_write(1)
    assert twin.blocks.tolist() == table.blocks.tolist()
    assert pool.ref_count(int(table.blocks[1])) == 2


def test_only_a_partly_filled_shared_tail_is_copied_and_only_once():
    table = BlockTable(BlockPool(8), block_size=4)
    table.append(6)
    twin = table.fork()
    source = int(table.blocks[1])
    copies = twin.prepare_write(4)
    assert copies == [(source, int(twin.blocks[1]))]
    assert table.blocks[1] == source
    assert twin.blocks[0] == table.blocks[0]
    assert twin.prepare_write(4) == []
    assert table.prepare_write(1) == []


def registered_tail(pool: BlockPool, length: int) -> BlockTable:
    """A table, with blocks of 4 tokens, whose last block is registered."""
    table = BlockTable(pool, block_size=4)
    table.append(length)
    pool.register(int(table.blocks[-1]))
    return table


def test_a_registered_tail_is_copied_and_stays_known():
    pool = BlockPool(3)
    table = registered_tail(pool, 6)
    source = int(table.blocks[1])
    with pytest.raises(IntegrityError, match="the prefix index knows"):
        table.append(1)
    assert table.prepare_write(2) == [(source, int(table.blocks[1]))]
    assert source not in table.blocks
    assert pool.eviction_order() == [source]
    table.append(2)
    table.check()
    pool.check()


def test_without_room_for_a_copy_a_registered_tail_is_forgotten():
    pool = BlockPool(3)
    table = registered_tail(pool, 6)
    told: list[int] = []
    pool.on_forget = told.append
    blocks = table.blocks.tolist()
    assert table.prepare_write(6) == []
    assert table.blocks[:2].tolist() == blocks
    assert told == blocks[1:]
    table.append(6)
    table.check()


def test_without_room_for_a_copy_a_registered_tail_of_two_sequences_is_kept():
    pool = BlockPool(2)
    table = registered_tail(pool, 6)
    twin = table.fork()
    with pytest.raises(CapacityError):
        twin.prepare_write(1)
    assert pool.is_registered(int(table.blocks[1]))
    assert twin.blocks.tolist() == table.blocks.tolist()


def test_adopted_blocks_are_held_and_freed_last_to_first():
    pool = BlockPool(4)
    table = BlockTable(pool, block_size=4)
    table.append(11)
    blocks = table.blocks.tolist()
    for block in blocks:
        pool.register(block)
    table.release()
    assert pool.eviction_order() == blocks[::-1]
    table.adopt(blocks, 10)
    table.check()
    assert (table.length, table.blocks.tolist(), pool.num_used) == (10, blocks, 3)
    with pytest.raises(IntegrityError, match="has 3 blocks"):
        table.adopt([], 0)
    with pytest.raises(IntegrityError, match="2 blocks with 9 tokens"):
        BlockTable(pool, block_size=4).adopt(blocks[:2], 9)


def test_an_exchanged_block_is_given_back():
    pool = BlockPool(4)
    table, other = BlockTable(pool, block_size=4), BlockTable(pool, block_size=4)
    table.append(8)
    other.append(4)
    own, equal = int(table.blocks[0]), int(other.blocks[0])
    table.exchange(0, equal)
    assert (table.blocks[0], pool.ref_count(equal), pool.ref_count(own)) == (equal, 2, 0)


def test_no_more_blocks_are_known_than_are_full_and_held():
    pool = BlockPool(8)
    table = BlockTable(pool, block_size=4)
    table.append(12)
    for block in table.blocks.tolist():
        pool.register(block)
    table.num_known = 3
    assert table.fork().num_known == 3
    table.truncate(11)
    assert table.num_known == 2
    table.check()
    table.num_known = 3
    with pytest.raises(IntegrityError, match="3 full blocks are known"):
        table.check()
    pool.forget(int(table.blocks[1]))
    with pytest.raises(IntegrityError, match="is not registered"):
        table.check()


def test_a_full_shared_tail_is_not_copied():
    table = BlockTable(BlockPool(8), block_size=4)
    table.append(8)
    twin = table.fork()
    assert twin.prepare_write(1) == []
    twin.append(1)
    assert twin.blocks[:2].tolist() == table.blocks.tolist()


def test_appending_into_a_shared_block_is_refused():
    table = BlockTable(BlockPool(4), block_size=4)
    table.append(2)
    twin = table.fork()
    with pytest.raises(IntegrityError, match="call prepare_write first"):
        twin.append(1)
    assert twin.length == 2


def test_a_fork_does_not_share_what_is_only_reserved():
    pool = BlockPool(8)
    table = BlockTable(pool, block_size=4)
    table.append(3)
    table.reserve(12)
    twin = table.fork()
    assert twin.blocks.tolist() == table.blocks[:1].tolist()
    table.check()
    twin.check()


def test_truncate_releases_whole_blocks_and_release_all():
    pool = BlockPool(8)
    table = BlockTable(pool, block_size=4)
    table.append(10)
    table.reserve(8)
    table.truncate(5)
    assert (table.length, len(table.blocks), pool.num_free) == (5, 2, 6)
    table.truncate(4)
    assert len(table.blocks) == 1
    table.release()
    table.release()
    assert (table.length, pool.num_free) == (0, 8)
    table.append(1)
    assert table.length == 1


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6)])
def test_ranges_outside_the_sequence_are_refused(start, stop):
    table = BlockTable(BlockPool(4), block_size=4)
    table.append(5)
    with pytest.raises(IndexError, match="holds 5"):
        table.slots(start, stop)


def test_check_names_a_block_held_twice_and_a_freed_one():
    pool = BlockPool(4)
    table = BlockTable(pool, block_size=4)
    table.append(8)
    table._entries[1] = table._entries[0]
    with pytest.raises(IntegrityError, match="one block twice"):
        table.check()
    table._entries[1] = 3
    with pytest.raises(IntegrityError, match="block 3, which is free"):
        table.check()
