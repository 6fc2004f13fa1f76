import pytest

from prolepsis.errors import IntegrityError
from prolepsis.kv.block_pool import BlockPool
from prolepsis.kv.block_table import BlockTable
from prolepsis.kv.prefix_index import PrefixIndex

SIZE = 4


class Place:
    """A pool with its index, and what every test does with them."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool, SIZE)

    def table(self, length: int = 0) -> BlockTable:
        table = BlockTable(self.pool, SIZE)
        table.append(length)
        return table

    def known(self, tokens: list[int], salt: str = "", *, tail: bool = False) -> list[int]:
        """Blocks of a sequence that has come, been registered and gone."""
        table = self.table(len(tokens))
        self.index.register(table, tokens, salt, tail=tail)
        blocks = table.blocks.tolist()
        table.release()
        return blocks

    def found(self, tokens: list[int], salt: str = "") -> tuple[int, list[int]]:
        """Tokens that match, and the blocks they are in."""
        table = self.table()
        length = self.index.match(table, tokens, salt)
        assert length == table.length
        table.check()
        self.check()
        blocks = table.blocks.tolist()
        table.release()
        return length, blocks

    def check(self) -> None:
        self.pool.check()
        self.index.check()


@pytest.fixture
def place():
    place = Place()
    yield place
    place.check()
    assert place.pool.num_used == 0


def test_full_blocks_of_a_known_beginning_are_shared(place):
    tokens = list(range(10))
    blocks = place.known(tokens)
    assert place.found([*range(8), 90, 91]) == (8, blocks[:2])
    assert place.found([90, *range(10)]) == (0, [])
    assert len(place.index) == 2


def test_one_token_is_left_to_be_run(place):
    blocks = place.known(list(range(8)))
    assert place.found(list(range(9))) == (8, blocks)
    assert place.found(list(range(8))) == (7, blocks)
    assert place.found(list(range(5))) == (4, blocks[:1])
    assert place.found([0]) == (0, [])
    assert place.found([]) == (0, [])


def test_a_table_that_ends_with_a_known_block_is_continued(place):
    tokens = list(range(20))
    table = place.table(8)
    place.index.register(table, tokens)
    assert place.index.match(table, tokens) == 0
    blocks = place.known(tokens[:14], tail=True)
    assert blocks[:2] == table.blocks.tolist()
    assert place.index.match(table, tokens) == 6
    assert (table.blocks.tolist(), table.length, table.num_known) == (blocks, 14, 3)
    table.release()


def test_a_table_that_ends_elsewhere_is_left_alone(place):
    tokens = list(range(20))
    place.known(tokens)
    unknown, partly, reserved = place.table(4), place.table(6), place.table(4)
    reserved.reserve(1)
    place.index.register(reserved, tokens)
    for table in (unknown, partly, reserved):
        assert place.index.match(table, tokens) == 0
        table.release()


def test_the_best_partly_matching_block_follows_the_full_ones(place):
    shorter = place.known([0, 1, 2, 3, 4, 70, 71, 72])
    longer = place.known([0, 1, 2, 3, 4, 5, 80, 81])
    assert longer[0] == shorter[0]
    assert place.found([0, 1, 2, 3, 4, 5, 6, 7, 8]) == (6, [shorter[0], longer[1]])
    assert place.found([0, 1, 2, 3, 4, 70, 9, 9]) == (6, shorter)
    assert place.found([0, 1, 9, 9, 9]) == (2, shorter[:1])
    assert place.found([0, 1, 2, 3, 9, 9]) == (4, shorter[:1])


def test_a_partly_filled_tail_is_known_where_it_is_asked_for(place):
    place.known([0, 1, 2, 3, 4, 5])
    assert place.found([0, 1, 2, 3, 4, 5, 6])[0] == 4
    blocks = place.known([0, 1, 2, 3, 4, 5], tail=True)
    assert place.found([0, 1, 2, 3, 4, 5, 6]) == (6, [0, blocks[1]])
    assert place.found([0, 1, 2, 3, 4, 5]) == (5, [0, blocks[1]])
    assert place.found([0, 1, 2, 3, 4, 9, 9]) == (5, [0, blocks[1]])


def test_tokens_are_the_same_only_after_the_same_tokens(place):
    place.known([1, 1, 1, 1, 2, 2, 2, 2])
    assert place.found([2, 2, 2, 2, 2])[0] == 0
    place.known([3, 3, 3, 3, 4, 4, 4, 4])
    assert place.found([3, 3, 3, 3, 2, 2, 2, 2, 2])[0] == 4


def test_salts_are_kept_apart(place):
    tokens = list(range(9))
    assert place.known(tokens, "a") != place.known(tokens, "b")
    assert place.found(tokens, "a")[1] != place.found(tokens, "b")[1]
    assert place.found(tokens) == (0, [])
    table = place.table(9)
    place.index.register(table, tokens, "a")
    table.append(3)
    with pytest.raises(IntegrityError, match="under another"):
        place.index.register(table, list(range(12)), "b")
    table.release()


def test_registering_goes_on_where_it_ended_and_follows_a_truncation(place):
    table, tokens = place.table(), list(range(40))
    for length in range(1, 30):
        table.append(1)
        place.index.register(table, tokens)
        assert table.num_known == length // SIZE == len(place.index)
    table.truncate(17)
    changed = [*range(17), *range(70, 80)]
    assert len(table.prepare_write(10)) == 1
    table.append(10)
    place.index.register(table, changed)
    assert place.found([*changed, 99]) == (27 // SIZE * SIZE, table.blocks[: 27 // SIZE].tolist())
    assert place.found(tokens)[0] == 28
    table.release()


def test_equal_blocks_become_one(place):
    tokens = list(range(10))
    first, second = place.table(10), place.table(10)
    place.index.register(first, tokens, tail=True)
    place.index.register(second, tokens)
    assert second.blocks[:2].tolist() == first.blocks[:2].tolist()
    assert second.blocks[2] != first.blocks[2]
    assert place.pool.num_used == 4
    place.index.register(second, tokens, tail=True)
    assert second.blocks.tolist() == first.blocks.tolist()
    assert place.pool.num_used == 3
    second.release()
    first.release()


def test_a_tail_that_is_part_of_a_known_block_is_not_registered_twice(place):
    blocks = place.known(list(range(8)))
    table = place.table()
    assert place.index.match(table, [0, 1, 2, 3, 4, 5, 90]) == 6
    place.index.register(table, [0, 1, 2, 3, 4, 5], tail=True)
    assert (table.blocks.tolist(), len(place.index)) == (blocks, 2)
    table.release()


def test_a_tail_that_another_table_may_fill_is_not_registered(place):
    table = place.table(6)
    fork = table.fork()
    fork.truncate(5)
    place.index.register(fork, list(range(5)), tail=True)
    assert len(place.index) == 1
    fork.release()
    table.append(2)
    place.index.register(table, list(range(8)))
    assert place.found(list(range(9)))[0] == 8
    table.release()


def test_the_end_of_a_chain_is_evicted_before_its_beginning():
    place = Place(num_blocks=4)
    tokens = list(range(16))
    place.known(tokens)
    hog = place.table()
    for left in (12, 8, 4, 0):
        hog.append(SIZE)
        assert place.found([*tokens, 99])[0] == left
    hog.release()
    assert len(place.index) == 0


def test_what_was_used_last_is_evicted_last():
    place = Place(num_blocks=4)
    place.known([1] * 8)
    place.known([2] * 8)
    place.found([1] * 9)
    hog = place.table(8)
    assert (place.found([1] * 9)[0], place.found([2] * 9)[0]) == (8, 0)
    hog.release()


def test_a_fork_that_alone_holds_the_end_of_a_chain_does_not_keep_it_known():
    place = Place(num_blocks=6)
    tokens = list(range(8))
    place.known(tokens[:4])
    table = place.table(8)
    fork = table.fork()
    place.index.register(table, tokens)
    assert table.blocks[0] != fork.blocks[0]
    assert table.blocks[1] == fork.blocks[1]
    table.release()
    hog = place.table(4 * SIZE)
    place.check()
    assert len(place.index) == 0
    place.index.register(fork, tokens)
    assert place.found([*tokens, 99]) == (8, fork.blocks.tolist())
    hog.release()
    fork.release()


def test_a_full_pool_can_go_on_with_the_last_token_of_a_known_sequence():
    place = Place(num_blocks=2)
    blocks = place.known(list(range(8)))
    table = place.table()
    assert place.index.match(table, list(range(8))) == 7
    assert table.prepare_write(1) == []
    table.append(1)
    place.check()
    assert (table.blocks.tolist(), len(place.index)) == (blocks, 1)
    place.index.register(table, list(range(8)))
    assert len(place.index) == 2
    table.release()


def test_what_was_known_before_clear_is_not_found_and_does_no_harm(place):
    tokens = list(range(12))
    place.known([7] * 8)
    table = place.table(8)
    fork = table.fork()
    place.index.register(table, tokens)
    place.index.clear()
    place.check()
    assert len(place.index) == 2
    assert (place.found([7] * 8)[0], place.found(tokens)[0]) == (0, 0)
    for sequence in (table, fork):
        sequence.append(4)
        place.index.register(sequence, tokens)
        assert place.found(tokens)[0] == 0
    blocks = place.known(tokens)
    assert place.found([*tokens, 99]) == (12, blocks)
    table.release()
    fork.release()
    place.table(16 * SIZE).release()
    assert len(place.index) == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index, pool: pool._registered.__setitem__(0, False), "block 0 is registered in only one"),
        (lambda index, pool: index._nodes.pop(1), "block 1 is registered in only one"),
        (lambda index, pool: setattr(index._nodes[0], "block", 1), "block 0 is not where"),
        (lambda index, pool: setattr(index._nodes[1], "key", b"1234"), "block 1 is not where"),
        (lambda index, pool: setattr(index._nodes[1], "salt", "x"), "another salt"),
        (lambda index, pool: index._roots[""].children.clear(), "block 0 is not where"),
        (lambda index, pool: index._roots.update(x=index._nodes[0]), "root for the salt 'x'"),
    ],
)
def test_check_names_what_is_wrong(damage, message):
    place = Place()
    place.known(list(range(8)))
    damage(place.index, place.pool)
    with pytest.raises(IntegrityError, match=message):
        place.index.check()
