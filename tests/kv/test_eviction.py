"""Tables that drop units: which ones, and what a table that is cut still knows."""

import numpy as np
import pytest

from prolepsis.errors import InputError, IntegrityError
from prolepsis.kernels import attention_parts
from prolepsis.kv.block_pool import BlockPool
from prolepsis.kv.eviction import UNIT, EvictingTable, Eviction

POLICY = Eviction.named("h2o:256", 2048)  # eight units, of which the last four stay


def new_table(block_size: int = 32, policy: Eviction = POLICY) -> EvictingTable:
    return EvictingTable(BlockPool(64), block_size, policy)


def grow(table: EvictingTable, tokens: int, mass: list[int]) -> int:
    table.append(tokens)
    return table.observe(np.array(mass, np.int64))


def test_units_are_those_whose_attention_is_summed() -> None:
    assert UNIT == attention_parts.UNIT


@pytest.mark.parametrize(
    ("text", "context", "budget"),
    [("h2o:512", 2048, 512), ("h2o:543", 2048, 512), ("h2o:12.5%", 2048, 256), ("h2o:100%", 2000, 1984),
     ("h2o:99999999", 2000, 2016)],
)  # fmt: skip
def test_budgets_are_whole_units(text: str, context: int, budget: int) -> None:
    assert Eviction.named(text, context) == (budget, budget // 64 * 32)


@pytest.mark.parametrize(
    "text", ["h2o", "h2o:", "h2o:x", "h2o:-512", "h2o:5e2", "h2o:%", "window:512", "512", "h2o:1.2.3"]
)
def test_other_policies_are_not_known(text: str) -> None:
    with pytest.raises(InputError, match="kv_evict must be none, or tokens or a share such as h2o:512 or h2o:20%"):
        Eviction.named(text, 2048)


@pytest.mark.parametrize(("text", "left"), [("h2o:127", 96), ("h2o:0", 0), ("h2o:5%", 96)])
def test_budgets_can_be_too_small(text: str, left: int) -> None:
    with pytest.raises(InputError, match=f"leaves {left} of 2048 tokens; it takes 128 at least"):
        Eviction.named(text, 2048)


@pytest.mark.parametrize("block_size", [16, 32])
def test_the_unit_of_least_attention_goes_and_recent_ones_stay(block_size: int) -> None:
    table = new_table(block_size)
    assert grow(table, 250, [9, 5, 3, 4, 0, 0, 0, 0]) == 0
    before, blocks = table.blocks.tolist(), UNIT // block_size
    assert grow(table, 6, [0, 0, 3, 0, 0, 0, 0, 0]) == UNIT  # units of 9, 5, 6 and 4
    assert table.blocks.tolist() == before[: 3 * blocks] + before[4 * blocks :]
    assert (table.length, table.held, table.evicted, table.room) == (256, 224, 32, UNIT)
    assert table.pool.num_used == 224 // block_size
    table.check()
    assert grow(table, UNIT, [0, 2, 0, 8, 0, 0, 0, 0]) == UNIT  # 9, 7, 6 and 8, once unit 4
    assert table.blocks.tolist()[: 3 * blocks] == before[: 2 * blocks] + before[4 * blocks : 5 * blocks]
    assert table.pool.num_used == 224 // block_size
    assert table.blocks_to_write(10_000) == blocks


def test_no_more_than_the_room_is_taken_at_once() -> None:
    table = new_table()
    table.prepare_write(256)
    with pytest.raises(IntegrityError, match="257 tokens at once for a table with room for 256"):
        table.append(257)
    grow(table, 256, [1] * 8)
    with pytest.raises(IntegrityError, match="33 tokens at once for a table with room for 32"):
        table.append(33)


def test_tokens_that_run_again_count_once_and_others_start_from_nothing() -> None:
    table = new_table()
    grow(table, 256, [4, 3, 2, 1, 0, 0, 0, 0])
    grow(table, 3, [1] * 8)
    assert table.first_unseen == table.held
    table.truncate(258)
    assert (table.first_unseen, table.held) == (227, 226)
    table.rewind(258)  # what was observed of the token that was cut cannot be taken back
    assert (table.length, table.evicted, table.first_unseen, table.pool.num_used) == (0, 0, 0, 0)
    grow(table, 256, [1, 2, 3, 4, 0, 0, 0, 0])
    table.truncate(255)  # before the last eviction
    assert (table.length, table.evicted, table.first_unseen, table.pool.num_used) == (0, 0, 0, 0)


def test_forks_forget_each_on_their_own() -> None:
    table = new_table()
    grow(table, 256, [4, 3, 2, 1, 0, 0, 0, 0])
    grow(table, UNIT - 1, [0, 0, 0, 5, 0, 0, 0, 0])
    twin = table.fork()
    assert (twin.length, twin.evicted, twin.first_unseen) == (table.length, table.evicted, table.first_unseen)
    shared = table.blocks.tolist()
    for each, last in ((table, [9, 0, 0, 0, 0, 0, 0, 0]), (twin, [0, 0, 9, 0, 0, 0, 0, 0])):
        each.prepare_write(1)
        grow(each, 1, last)
    assert table.blocks[:7].tolist() == [*shared[:2], *shared[3:7], table.blocks[6]]
    assert twin.blocks[:7].tolist() == [shared[0], *shared[2:7], twin.blocks[6]]
    for each in (table, twin):
        each.check()
        each.release()
    assert table.pool.num_used == 0


def test_what_is_left_cannot_be_read_by_position() -> None:
    table = new_table()
    grow(table, 250, [1] * 8)
    assert len(table.slots(10, 20)) == 10
    grow(table, 6, [1] * 8)
    with pytest.raises(IndexError, match="32 of 256 tokens were evicted"):
        table.slots(100, 120)
