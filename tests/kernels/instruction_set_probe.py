"""A hash of the kernels' results, which must be the same on every instruction set.

usage: instruction_set_probe.py short|whole DIRECTORY
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "kernels"), str(TESTS / "model")]


def short(directory):
    """A product with four weight types and an attention call for each cache dtype."""
    from attention_cases import Case
    from weight_cases import activations, pack_weights, random_blocks

    from prolepsis.kernels.qmatmul import multiply_tiles, quantise

    rng = np.random.default_rng(0)
    weights = pack_weights([(name, random_blocks(name, 48, 256, rng)) for name in ("Q4_1", "Q8_0", "Q6_K", "F16")])
    x = rng.standard_normal((13, 256)).astype(np.float32)
    held, out = activations(x), np.zeros((13, 192), np.float32)
    for row in range(13):
        quantise(held, row, 256)
    multiply_tiles(weights, 0, 4, 0, 12, held, 13, out.reshape(-1), 192)
    yield out
    for dtype in ("bf16", "fp16"):
        yield Case.random(rng, [200, 33], [20, 1], dtype=dtype).run(threads=1)


def whole(directory):
    """Prompt and decode steps of a model with every weight type, with both cache dtypes."""
    from decoding import VOCAB, Session, TinyModel

    tokens = np.random.default_rng(1).integers(0, VOCAB, 180)
    file = TinyModel.random(0).write(directory / "probe.gguf")
    for dtype in ("bf16", "fp16"):
        session = Session(file, kv_dtype=dtype)
        yield session.in_chunks(tokens, [150, 1])
        yield session.kv(len(tokens))


def result_hash(length, directory):
    """SHA-256 of the results of `short` or `whole`, which may write into `directory`."""
    digest = hashlib.sha256()
    for array in {"short": short, "whole": whole}[length](directory):
        assert np.isfinite(array).all()
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(result_hash(sys.argv[1], Path(sys.argv[2])))
