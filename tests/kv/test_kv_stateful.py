"""Random programs over pool, tables, prefix index and cache, checked after every step against Python lists.

What is written for a token depends on its salt and on all tokens before it, as K and V do: a block that were taken over
from another beginning, or from another salt, would not hold what the list says.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prolepsis.errors import CapacityError
from prolepsis.kv.block_table import BlockTable
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.prefix_index import PrefixIndex

NUM_BLOCKS, BLOCK_SIZE = 12, 4
SALTS = ("", "other")
TOKENS = st.lists(st.integers(0, 1), max_size=11)  # two ids only, so that beginnings are often the same


def values_of(tokens: list[int], salt: str) -> list[int]:
    """What the cache holds for each token: a number made of the salt and the tokens up to it."""
    values, value = [], 1 + SALTS.index(salt)
    for token in tokens:
        value = (value * 31 + token * 17 + 5) % 65521
        values.append(value)
    return values


class Running:
    """A block table beside the plain list of tokens it should hold."""

    def __init__(self, table: BlockTable, salt: str, tokens: list[int]) -> None:
        self.table = table
        self.salt = salt
        self.tokens = tokens


class PagedSequences(RuleBasedStateMachine):
    """Sequences that come, grow, fork, shrink and go, in a cache that is often full."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedKVCache(1, 2, 1, BLOCK_SIZE, NUM_BLOCKS)
        self.pool = self.cache.pool
        self.index = PrefixIndex(self.pool, BLOCK_SIZE)
        self.running: list[Running] = []
        self.start("")

    def pick(self, data: st.DataObject) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1), label="sequence")]

    def blocks_needed(self, one: Running, count: int) -> int:
        """From the lists alone: what a write of `count` tokens must take from the pool."""
        tail = len(one.tokens) // BLOCK_SIZE
        shared_tail = len(one.tokens) % BLOCK_SIZE != 0 and any(
            one.table.blocks[tail] in other.table.blocks for other in self.running if other is not one
        )
        missing = -(-(len(one.tokens) + count) // BLOCK_SIZE) - len(one.table.blocks)
        return max(missing, 0) + (shared_tail and count > 0)

    def write(self, one: Running, new: list[int]) -> bool:
        fits = self.blocks_needed(one, len(new)) <= self.pool.num_free
        try:
            self.cache.copy_blocks(one.table.prepare_write(len(new)))
        except CapacityError:
            assert not fits
            return False
        assert fits
        one.table.append(len(new))
        values = np.array(values_of(one.tokens + new, one.salt)[len(one.tokens) :], dtype=np.uint16)
        planes = np.broadcast_to(values[None, None, :, None, None], (1, 2, len(new), 2, 1))
        self.cache.write(one.table, len(one.tokens), planes)
        one.tokens += new
        return True

    @rule(salt=st.sampled_from(SALTS))
    def start(self, salt: str) -> None:
        self.running.append(Running(self.cache.new_table(), salt, []))

    @rule(data=st.data(), new=TOKENS)
    def append(self, data: st.DataObject, new: list[int]) -> None:
        self.write(self.pick(data), new)

    @rule(data=st.data(), salt=st.sampled_from(SALTS), new=TOKENS)
    def match(self, data: st.DataObject, salt: str, new: list[int]) -> None:
        """A request whose prompt begins like some sequence; what is not known of it is computed."""
        prompt = self.pick(data).tokens + new
        table = self.cache.new_table()
        free, known = self.pool.num_free, len(self.index)
        length = self.index.match(table, prompt, salt)
        assert table.length == length <= max(len(prompt) - 1, 0)
        assert len(self.index) == known
        assert self.pool.num_free >= free - len(table.blocks)
        one = Running(table, salt, prompt[:length])
        self.running.append(one)
        self.nothing_is_lost_or_mixed_up()
        if not self.write(one, prompt[length:]):
            self.let_go(one)

    @rule(data=st.data(), new=TOKENS)
    def match_on(self, data: st.DataObject, new: list[int]) -> None:
        """A sequence that others have overtaken in the meantime."""
        one = self.pick(data)
        count = self.index.match(one.table, one.tokens + new, one.salt)
        assert count < max(len(new), 1)
        one.tokens += new[:count]

    @rule(data=st.data(), tail=st.booleans())
    def register(self, data: st.DataObject, tail: bool) -> None:
        one = self.pick(data)
        self.index.register(one.table, one.tokens, one.salt, tail=tail)
        assert one.table.num_known == len(one.tokens) // BLOCK_SIZE
        table = self.cache.new_table()
        assert self.index.match(table, [*one.tokens, 9], one.salt) >= len(one.tokens) // BLOCK_SIZE * BLOCK_SIZE
        table.release()

    @rule(data=st.data())
    def register_and_release(self, data: st.DataObject) -> None:
        one = self.pick(data)
        self.index.register(one.table, one.tokens, one.salt, tail=True)
        self.let_go(one)

    @rule(data=st.data(), count=st.integers(0, 20))
    def reserve(self, data: st.DataObject, count: int) -> None:
        table = self.pick(data).table
        before = (table.blocks.tolist(), self.pool.num_free)
        try:
            table.reserve(count)
        except CapacityError:
            assert (table.blocks.tolist(), self.pool.num_free) == before
        else:
            assert table.capacity >= table.length + count

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        one = self.pick(data)
        free = self.pool.num_free
        self.running.append(Running(one.table.fork(), one.salt, list(one.tokens)))
        assert self.pool.num_free == free

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        one = self.pick(data)
        length = data.draw(st.integers(0, len(one.tokens)), label="length")
        one.table.truncate(length)
        del one.tokens[length:]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.let_go(self.pick(data))

    def let_go(self, one: Running) -> None:
        one.table.release()
        self.running.remove(one)
        if not self.running:
            assert self.pool.num_free == NUM_BLOCKS
            self.start("")

    @invariant()
    def nothing_is_lost_or_mixed_up(self) -> None:
        self.cache.check([one.table for one in self.running])
        self.index.check()
        for one in self.running:
            assert one.table.length == len(one.tokens)
            values = self.cache.read(one.table, 0, one.table.length)
            for plane in (values[0, 0, :, 0, 0], values[0, 1, :, 1, 0]):
                assert plane.tolist() == values_of(one.tokens, one.salt)


TestPagedSequences = PagedSequences.TestCase
TestPagedSequences.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
