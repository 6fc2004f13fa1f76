"""Which blocks hold the K and V of which tokens, so that a sequence takes over what another one has computed.

The tokens of a block are looked up below the block before it, as children of a node: a match means that all tokens from
the first on are the same. Token ids are compared themselves; no hash is trusted (`dict` compares equal hashes' keys).
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

from prolepsis.errors import IntegrityError
from prolepsis.kv.block_pool import BlockPool
from prolepsis.kv.block_table import BlockTable

_ID_BYTES = array("i").itemsize
_MAX_CANDIDATES = 32  # children of one node that are looked at, latest first, for a partly matching block


class _Node:
    """A registered block, or the root of a salt, which has none. `key` are its token ids; int32 as bytes."""

    __slots__ = ("block", "children", "key", "parent", "salt")

    def __init__(self, salt: str, parent: "_Node | None" = None, key: bytes = b"", block: int = -1) -> None:
        self.salt = salt
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[bytes, _Node] = {}


class PrefixIndex:
    """Finds the blocks of a known beginning of some tokens. The only index of its pool.

    What it has is always whole chains from a first block on: with a block, it forgets all that follow it. Sequences
    give their blocks back last to first, so the end of a chain is evicted before its beginning and little is lost.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Of a pool whose blocks can be settled, only full blocks are known and shared."""
        self._pool = pool
        self._whole = pool.recent.size > 0
        self._block_size = block_size
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by block
        pool.on_forget = self._forget

    def __len__(self) -> int:
        """Registered blocks, used and free."""
        return len(self._nodes)

    def match(self, table: BlockTable, tokens: Sequence[int], salt: str = "") -> int:
        """Let a table share the blocks that continue it along `tokens`, as far as they are known; returns their tokens.

        The table is empty, or ends with a full block that the index knows; with any other nothing is done. At least one
        token is left over, to be run for its logits. The last block may match in part: `prepare_write` then copies it.
        Only what was registered under the same salt is found. Nothing is allocated.
        """
        held = table.length
        if held != table.capacity or held != table.num_known * self._block_size:
            return 0
        chain, count = self._longest(self._last_known(table, salt), tokens, held)
        table.adopt([node.block for node in chain], count)
        table.num_known = table.length // self._block_size
        return count

    def known(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many of `tokens`, the last one left out, `match` would share. Nothing changes."""
        return self._longest(self._roots.get(salt) or _Node(salt), tokens, 0)[1]

    def register(self, table: BlockTable, tokens: Sequence[int], salt: str = "", *, tail: bool = False) -> None:
        """Make the full blocks of `table` known; with `tail`, the partly filled last one too, if no other table has it.

        `tokens` begins with those of the table. Where an equal block is known, the table gets that one for its own.
        Takes time for blocks that became full since the last call only. A tail is worth it where the sequence ends: one
        that goes on must copy it. Raises IntegrityError for a table that was registered under another salt.
        """
        size = self._block_size
        full = table.length // size
        tail = tail and not self._whole and table.length % size > 0
        stop = full + (tail and self._pool.ref_count(int(table.blocks[full])) == 1)
        if table.num_known == stop:
            return
        node = self._last_known(table, salt)
        for index in range(table.num_known, stop):
            known = self._learn(table, index, node, _pack(tokens[index * size : min((index + 1) * size, table.length)]))
            if known is None:
                return
            if index < full:
                node = known
                table.num_known += 1

    def clear(self) -> None:
        """Forget everything: what is known now will not be found. Blocks in use stay registered until they are free."""
        for block in self._pool.eviction_order():
            if self._pool.is_registered(block):  # else it went with one it followed
                self._pool.forget(block)
        self._roots.clear()

    def check(self) -> None:
        """Prove that the nodes are whole chains of registered blocks; IntegrityError names the first fault."""
        for block in range(self._pool.num_blocks):
            if self._pool.is_registered(block) != (block in self._nodes):
                raise IntegrityError(f"block {block} is registered in only one of pool and prefix index")
        for block, node in self._nodes.items():
            self._check_node(block, node)
        for salt, root in self._roots.items():
            if root.salt != salt or not root.children:
                raise IntegrityError(f"the prefix index has an empty or wrong root for the salt {salt!r}")

    def _longest(self, node: _Node, tokens: Sequence[int], start: int) -> tuple[list[_Node], int]:
        """The nodes below `node` that hold the longest known run of `tokens` from `start` on, and how long it is.

        The last token is not looked for.
        """
        chain: list[_Node] = []
        first, limit, size = start, len(tokens) - 1, self._block_size
        while start < limit:
            key = _pack(tokens[start : min(start + size, limit)])
            known = node.children.get(key) if start + size <= limit else None
            if known is None and self._whole:
                break
            if known is None:
                partly, agree = _best_partial(node, key)
                return chain + partly, start - first + agree
            node = known
            chain.append(node)
            start += size
        return chain, start - first

    def _last_known(self, table: BlockTable, salt: str) -> _Node:
        if table.num_known == 0:
            return self._roots.get(salt) or _Node(salt)
        node = self._nodes[int(table.blocks[table.num_known - 1])]
        if node.salt != salt:
            raise IntegrityError("a table that was registered under one salt is registered under another")
        return node

    def _learn(self, table: BlockTable, index: int, parent: _Node, key: bytes) -> _Node | None:
        """The node for block `index` of the table: a new one, or the known one, whose block the table then holds.

        None where the block is registered elsewhere: in a chain that was cleared, or as one of more ids.
        """
        block = int(table.blocks[index])
        node = parent.children.get(key)
        if node is not None:
            if node.block != block:
                table.exchange(index, node.block)
            return node
        if self._pool.is_registered(block):
            return None
        self._pool.register(block)
        node = self._nodes[block] = parent.children[key] = _Node(parent.salt, parent, key, block)
        if parent.parent is None:
            self._roots[parent.salt] = parent
        return node

    def _forget(self, block: int) -> None:
        """Drop a node. Those below it go first: a sequence that was forked off early may hold them alone."""
        node = self._nodes[block]
        for below in reversed(_below(node)):
            self._pool.forget(below.block)
        parent = node.parent
        assert parent is not None
        del self._nodes[block]
        del parent.children[node.key]
        if not parent.children and self._roots.get(parent.salt) is parent:
            del self._roots[parent.salt]

    def _check_node(self, block: int, node: _Node) -> None:
        parent = node.parent
        if parent is None or node.block != block or parent.children.get(node.key) is not node:
            raise IntegrityError(f"block {block} is not where the prefix index looks for it")
        if not 0 < len(node.key) <= self._block_size * _ID_BYTES or node.salt != parent.salt:
            raise IntegrityError(f"block {block} has {len(node.key) // _ID_BYTES} ids, or another salt than its chain")
        if node.children and len(node.key) < self._block_size * _ID_BYTES:
            raise IntegrityError(f"block {block} is partly filled and yet followed by another")
        if parent.parent is not None and self._nodes.get(parent.block) is not parent:
            raise IntegrityError(f"the prefix index has lost the block before {block}")


def _pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _below(node: _Node) -> list[_Node]:
    """All nodes below `node`, each after the one before it."""
    found = list(node.children.values())
    for child in found:  # grows as it is read
        found += child.children.values()
    return found


def _best_partial(node: _Node, ids: bytes) -> tuple[list[_Node], int]:
    """Of the latest children, the one that begins with most of `ids`, and with how many; none and 0 if none does."""
    best: list[_Node] = []
    most = 0
    for child in islice(reversed(node.children.values()), _MAX_CANDIDATES):
        agree = sum(1 for _ in _same(ids, child.key))
        if agree > most:
            best, most = [child], agree
    return best, most


def _same(ids: bytes, others: bytes) -> Iterator[int]:
    """The ids that both begin with."""
    for one, other in zip(memoryview(ids).cast("i"), memoryview(others).cast("i"), strict=False):
        if one != other:
            return
        yield one
