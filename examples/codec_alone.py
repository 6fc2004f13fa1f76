"""Code the KV cache of any engine, without this one: arrays in, bytes out, and every bit back.

python examples/codec_alone.py
"""

import numpy as np

from prolepsis.coding import RopeSpec, decode, encode

LAYERS, TOKENS, KV_HEADS, HEAD_DIM = 4, 512, 2, 64


def main() -> None:
    """Code a cache as [layers, 2 (K, V), tokens, kv_heads, head_dim]; saying how K was turned makes it smaller."""
    rope = RopeSpec(theta=10_000.0, dim=HEAD_DIM, style="half")
    kv = example_cache(rope)
    plain, informed = encode(kv), encode(kv, rope=rope)
    print(f"raw {kv.nbytes} bytes, coded {len(plain)}, with RoPE known {len(informed)}")
    same = bool(np.array_equal(decode(informed), kv.view(np.uint16)))
    print(f"every bit restored: {same}")


def example_cache(rope: RopeSpec) -> np.ndarray:
    """float16 values such as a model makes: channels with means and widths of their own, K turned by position."""
    random = np.random.default_rng(0)
    channels = (LAYERS, 2, 1, KV_HEADS, HEAD_DIM)
    means, widths = 3 * random.normal(size=channels), np.exp(random.normal(size=channels))
    kv = means + widths * random.normal(size=(LAYERS, 2, TOKENS, KV_HEADS, HEAD_DIM))
    cos, sin = (table[:, None, :] for table in rope.table(0, TOKENS))
    first, second = np.split(kv[:, 0], 2, axis=-1)
    kv[:, 0] = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return kv.astype(np.float16)


if __name__ == "__main__":
    main()
