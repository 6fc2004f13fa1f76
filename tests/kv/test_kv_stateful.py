"""Random programs over pool, tables and cache, checked after every step against Python lists."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prolepsis.errors import CapacityError
from prolepsis.kv.cache import PagedKVCache

NUM_BLOCKS, BLOCK_SIZE = 12, 4


class PagedSequences(RuleBasedStateMachine):
    """Each sequence is a block table beside the plain list of numbers it should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedKVCache(1, 2, 1, BLOCK_SIZE, NUM_BLOCKS)
        self.tables = [self.cache.new_table()]
        self.contents: list[list[int]] = [[]]
        self.next_value = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.tables) - 1), label="sequence")

    def blocks_needed(self, index: int, count: int) -> int:
        """From the lists and the capacity alone: what a write of `count` tokens must take from the pool."""
        table, length = self.tables[index], len(self.contents[index])
        shared_tail = length % BLOCK_SIZE != 0 and any(
            table.blocks[length // BLOCK_SIZE] in other.blocks for other in self.tables if other is not table
        )
        missing = -(-(length + count) // BLOCK_SIZE) - len(table.blocks)
        return max(missing, 0) + (shared_tail and count > 0)

    @rule()
    def start(self) -> None:
        self.tables.append(self.cache.new_table())
        self.contents.append([])

    @rule(data=st.data(), count=st.integers(0, 11))
    def append(self, data: st.DataObject, count: int) -> None:
        index = self.pick(data)
        table = self.tables[index]
        fits = self.blocks_needed(index, count) <= self.cache.pool.num_free
        try:
            self.cache.copy_blocks(table.prepare_write(count))
        except CapacityError:
            assert not fits
            return
        assert fits
        assert table.append(count).shape == (count,)
        new = [(self.next_value + offset) % 65536 for offset in range(count)]
        self.next_value += count
        values = np.repeat(np.array(new, dtype=np.uint16)[None, None, :, None, None], 2, axis=1).repeat(2, axis=3)
        self.cache.write(table, len(self.contents[index]), values)
        self.contents[index] += new

    @rule(data=st.data(), count=st.integers(0, 20))
    def reserve(self, data: st.DataObject, count: int) -> None:
        table = self.tables[self.pick(data)]
        before = (table.blocks.tolist(), self.cache.pool.num_free)
        try:
            table.reserve(count)
        except CapacityError:
            assert (table.blocks.tolist(), self.cache.pool.num_free) == before
        else:
            assert table.capacity >= table.length + count

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        index = self.pick(data)
        free = self.cache.pool.num_free
        self.tables.append(self.tables[index].fork())
        self.contents.append(list(self.contents[index]))
        assert self.cache.pool.num_free == free

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        index = self.pick(data)
        length = data.draw(st.integers(0, len(self.contents[index])), label="length")
        self.tables[index].truncate(length)
        del self.contents[index][length:]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = self.pick(data)
        self.tables.pop(index).release()
        self.contents.pop(index)
        if not self.tables:
            assert self.cache.pool.num_free == NUM_BLOCKS
            self.start()

    @invariant()
    def nothing_is_lost_or_mixed_up(self) -> None:
        self.cache.check(self.tables)
        for table, content in zip(self.tables, self.contents, strict=True):
            assert table.length == len(content)
            values = self.cache.read(table, 0, table.length)
            for plane in (values[0, 0, :, 0, 0], values[0, 1, :, 1, 0]):
                assert plane.tolist() == content


TestPagedSequences = PagedSequences.TestCase
TestPagedSequences.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
