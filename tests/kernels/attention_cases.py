"""Attention problems over a paged cache, the kernels' answer and a float64 reference."""

from dataclasses import dataclass

import numpy as np
from numba import njit

from prolepsis.coding.cache_dtypes import FORMATS, QuantisedKV, arrays_of, quantise, to_scalars
from prolepsis.coding.past import as_attended
from prolepsis.kernels.kv_pool import KVPool
from prolepsis.kernels.paged_attention import (
    FAST_TILE_QUERIES,
    TILE_QUERIES,
    Tiles,
    attend_item,
    merge_shares,
    plan_attention,
)
from prolepsis.kernels.rows import DTYPES


@njit
def _attend(pool, tiles, group, threads, q, partial, partial_state, out, fast):
    rows = q.size // (pool.kv_heads * group * pool.head_dim)
    pairs, shares, span, width = plan_attention(pool, tiles, tiles.first_row.size, group, threads, partial.size, fast)
    for item in range(pairs * ((shares + span - 1) // span)):
        attend_item(pool, tiles, 0, group, rows, item, shares, span, width, q, partial, partial_state, out, fast)
    if shares > 1:
        merge_shares(pool, tiles, pairs, shares, width, group, partial, partial_state, out, fast)
    return shares


def to_bits(x, dtype):
    """float32 to the cache's uint16 patterns; bf16 by truncation, which is a rounding too."""
    if dtype == "fp16":
        return x.astype(np.float16).view(np.uint16)
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def nearest_brain(x):
    """float32 rounded to the nearest bf16, as float64."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return to_floats((bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16), "bf16")


def to_floats(bits, dtype):
    """The values of uint16 patterns, float64."""
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass
class Case:
    """Sequences with K, V [context, kv_heads, dim] each, as a cache of `dtype` stores them, and queries float32
    [rows, kv_heads * group, dim] for the last `rows` tokens of each context. Integers have steps, uint16
    [context, kv_heads]."""

    dtype: str
    group: int
    keys: list
    values: list
    queries: list
    key_steps: list | None = None
    value_steps: list | None = None
    fast: bool = False

    @classmethod
    def random(cls, rng, contexts, rows, kv_heads=2, group=3, dim=64, dtype="bf16", spread=1.0, fast=False):
        def cached(context):
            return to_bits(rng.standard_normal((context, kv_heads, dim)).astype(np.float32), dtype)

        queries = [rng.standard_normal((n, kv_heads * group, dim)).astype(np.float32) * spread for n in rows]
        if FORMATS[dtype].bits == 16:
            return cls(dtype, group, *([cached(n) for n in contexts] for _ in range(2)), queries, fast=fast)
        normal = [rng.standard_normal((1, 2, n, kv_heads, dim)).astype(np.float32) for n in contexts]
        return cls.of([quantise(x, dtype) for x in normal], queries, group, dtype, fast)

    @classmethod
    def of(cls, stored, queries, group, dtype, fast=False):
        """With KV of a dtype of fewer than 16 bits, [1, 2, context, kv_heads, dim] for each sequence."""
        keys, values = ([[array[0, kind] for array in arrays_of(kv)] for kv in stored] for kind in range(2))
        steps = [[rest[0] for _, *rest in arrays] if FORMATS[dtype].limit else None for arrays in (keys, values)]
        return cls(dtype, group, [k[0] for k in keys], [v[0] for v in values], queries, *steps, fast)

    def widened(self):
        """The same with K and V as the bf16 that attention should read."""

        def wide(stored, steps):
            out = []
            for i, values in enumerate(stored):
                kv = values if steps is None else QuantisedKV(values, steps[i])
                out.append(as_attended(to_scalars(kv, self.dtype), None if steps is None else steps[i], self.dtype))
            return out

        keys, values = wide(self.keys, self.key_steps), wide(self.values, self.value_steps)
        return Case("bf16", self.group, keys, values, self.queries, fast=self.fast)

    def pool(self, block_size, rng, filler=0xFFFF):
        """(pool, block tables) with blocks in random places and `filler` in every slot that holds no token."""
        (_, heads, width), dim = self.keys[0].shape, self.queries[0].shape[2]
        needed = [-(-len(k) // block_size) for k in self.keys]
        total = sum(needed) + 3
        kind = self.keys[0].dtype
        k = np.full((total, heads, width * block_size * kind.itemsize // 2), filler, np.uint16).view(kind)
        v = k.copy().reshape(total, heads, block_size, width)
        k = k.reshape(total, heads, width, block_size)
        steps = np.full((2, total, heads, 0 if self.key_steps is None else block_size), filler, np.uint16)
        places = iter(rng.permutation(total))
        tables = np.zeros((len(needed), max(needed) + 1), np.int32)
        for sequence, count in enumerate(needed):
            for i in range(count):
                block = tables[sequence, i] = next(places)
                part = slice(i * block_size, (i + 1) * block_size)
                keys, values = self.keys[sequence][part], self.values[sequence][part]
                k[block, :, :, : len(keys)] = keys.transpose(1, 2, 0)
                v[block, :, : len(values)] = values.transpose(1, 0, 2)
                for own, given in zip(steps, (self.key_steps, self.value_steps), strict=True):
                    if given is not None:
                        own[block, :, : len(keys)] = given[sequence][part].T
        flat = (array.reshape(-1).view(np.uint16) for array in (k, v, *steps))
        return KVPool(*flat, total, heads, dim, block_size, DTYPES[self.dtype]), tables

    def run(self, block_size=32, rng=None, filler=0xFFFF, threads=2, rows_a_tile=None, room=1 << 22):
        """The kernels' output, float32 [all rows, kv_heads * group * dim]."""
        pool, tables = self.pool(block_size, rng or np.random.default_rng(0), filler)
        step = rows_a_tile or max(1, (FAST_TILE_QUERIES if self.fast else TILE_QUERIES) // self.group)
        tiles, row = [], 0
        for sequence, queries in enumerate(self.queries):
            start = len(self.keys[sequence]) - len(queries)
            for first in range(0, len(queries), step):
                tiles.append((row + first, min(step, len(queries) - first), start + first, sequence))
            row += len(queries)
        first_row, num_rows, first_position, sequences = np.array(tiles, np.int64).T.copy()
        q = np.concatenate(self.queries).reshape(row, pool.kv_heads, self.group, pool.head_dim).transpose(1, 0, 2, 3)
        q = np.ascontiguousarray(q).reshape(-1)
        out = np.full(q.size, np.nan, np.float32)
        partial = np.full(room, np.nan, np.float32)
        state = np.full(2 * room // pool.head_dim, np.nan, np.float32)
        tiles = Tiles(first_row, num_rows, first_position, sequences, tables)
        _attend(pool, tiles, self.group, threads, q, partial, state, out, self.fast)
        return out.reshape(row, -1)

    def reference(self):
        """(exact output, bound of its error), float64 [all rows, kv_heads * group * dim].

        A score is a chain of dim multiply-adds: |error| <= dim u sum |q k| = e. So a weight is off by a factor within
        exp(2 e + rounding), which the division by their sum can only double, and the values are summed in order. If
        fast, the exact output is that of queries rounded to bf16, and weights are rounded to it, too.
        """
        u = 2.0**-24
        outputs, bounds = [], []
        for keys, values, queries in zip(self.keys, self.values, self.queries, strict=True):
            k, v = (np.repeat(to_floats(x, self.dtype), self.group, axis=1) for x in (keys, values))
            q = nearest_brain(queries) if self.fast else queries.astype(np.float64)
            n, dim = len(k), k.shape[2]
            visible = np.arange(n) <= np.arange(n - len(q), n)[:, None]
            scores = np.where(visible, np.einsum("rhd,thd->hrt", q, k), -np.inf)
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            error = dim * u * np.einsum("rhd,thd->hrt", np.abs(q), np.abs(k))
            error = np.where(visible, error, 0).max(axis=2)
            relative = np.expm1(4 * error + (8 + np.abs(np.where(visible, scores, 0)).max(axis=2) + n / 8) * 2 * u)
            outputs.append(np.einsum("hrt,thd->rhd", weights, v).reshape(len(q), -1))
            size = np.einsum("hrt,thd->rhd", weights, np.abs(v))
            if self.fast:
                relative += 2 * 2.0**-9
            bounds.append((relative.T[:, :, None] * size).reshape(len(q), -1) + n * u * size.reshape(len(q), -1))
        return np.concatenate(outputs), np.concatenate(bounds)
