"""A hash of the kernels' results, which must be the same on every instruction set.

usage: instruction_set_probe.py short|kinds|whole|streams|coding DIRECTORY
"""

import hashlib
import os
import sys
from io import BytesIO
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "kernels"), str(TESTS / "model"), str(TESTS / "coding")]
HOST, PROBE = "of_the_host", "of_the_probe"  # folders of session files


def short(directory):
    """Products with kinds of weights that differ in their parts, attention for each cache dtype, weights quantised."""
    from attention_cases import Case

    from prolepsis.coding.cache_dtypes import TOKEN_DTYPES
    from prolepsis.quant.rounding import rounded_codes

    rng = np.random.default_rng(0)
    yield from products(rng, ("Q4_1", "Q8_0", "Q6_K", "F16", "Q2_K", "IQ4_XS", "INT5"))
    for dtype in TOKEN_DTYPES:
        for fast in (False, True):
            yield Case.random(rng, [200, 33], [20, 1], dtype=dtype, fast=fast).run(threads=1)
        if dtype not in ("bf16", "fp16"):
            yield from stored_heads(rng, dtype)
    importance = np.linspace(0, 3, 256, dtype=np.float32)
    for kind in ("Q4_K", "IQ4_XS", "Q8_0"):
        codes = rounded_codes(kind, rng.standard_normal((20, 256)).astype(np.float32), importance)
        yield from (array for array in codes if array is not None)


def products(rng, kinds):
    """Those of every kind, with activations of 16 bits and of 8."""
    from weight_cases import activations, multiplied, random_matrix, side_by_side

    weights = side_by_side([random_matrix(name, 48, 256, rng) for name in kinds])
    x = rng.standard_normal((13, 256)).astype(np.float32)
    for in_bytes in (False, True):
        yield multiplied(weights, 0, len(kinds), activations(x), 13, in_bytes)


def every_kind(directory):
    """Products with all kinds of weights."""
    from prolepsis.kernels.kinds import KINDS

    yield from products(np.random.default_rng(3), KINDS)


def stored_heads(rng, dtype):
    """What heads of every magnitude become in a cache of fewer than 16 bits."""
    from test_narrow_kv import stored

    return stored((rng.standard_normal((64, 64)) * 10.0 ** rng.integers(-9, 9, (64, 1))).astype(np.float32), dtype)


def whole(directory):
    """Prompt and decode steps of a model with every weight type, with every cache dtype."""
    from decoding import VOCAB, Session, TinyModel

    from prolepsis.kernels.rows import DTYPES
    from prolepsis.kv.stored import arrays_of

    tokens = np.random.default_rng(1).integers(0, VOCAB, 180)
    file = TinyModel.random(0).write(directory / "probe.gguf")
    for dtype in DTYPES:
        session = Session(file, kv_dtype=dtype)
        yield session.in_chunks(tokens, [150, 1])
        yield from arrays_of(session.kv(len(tokens)))


def streams(directory):
    """Streams of every dtype, of any shape and prediction."""
    from stream_cases import results

    yield from results()


def coding(directory):
    """Values of session files written on the host. Writes others, of the same values."""
    write_files(directory, PROBE)
    yield from values_of_files(directory, HOST)


# Files that twins code: variant, cache dtype, whether the values are those of a model.
TWINS = (("twin-int8", "bf16", True), ("twin-int8", "bf16", False), ("twin-int8a16", "fp16", True),
         ("twin-int4", "fp8_e4m3", True))  # fmt: skip


def write_profiles(directory):
    """Of `linear`, for each cache dtype, and of twins. Fitting them uses BLAS, whose results are not the same
    everywhere. And what the twins are to code, which it takes the engine to compute."""
    from linear_samples import linear_profile

    from prolepsis.coding.cache_dtypes import TOKEN_DTYPES
    from prolepsis.coding.profile_file import CalibratedProfile, to_bytes

    for dtype in TOKEN_DTYPES:
        profile = linear_profile(dtype, tokens=300)
        saved = CalibratedProfile(profile, profile.geometry, profile.rope, {}, 300)
        (directory / f"{dtype}.profile").write_bytes(to_bytes(saved))
    write_twins(directory)


def write_twins(directory):
    """The model, the text, and a profile for each of TWINS."""
    from twin_samples import ROPE, model

    from prolepsis.coding.profile_file import CalibratedProfile, to_bytes

    small = model(directory / "twin.gguf")
    for variant, dtype, sound in TWINS:
        ids, kv = small.text(3, 270, dtype)
        if not sound:
            kv = np.random.default_rng(0).integers(0, 1 << 16, kv.shape, np.uint16)
        name = twin_name(variant, dtype, sound)
        np.savez(directory / f"{name}.npz", ids=ids, kv=kv)
        if sound:
            profile = small.twin(variant, dtype)
            saved = CalibratedProfile(profile, profile.geometry, ROPE, {}, 600)
            (directory / f"{variant}_{dtype}.profile").write_bytes(to_bytes(saved))


def twin_name(variant, dtype, sound):
    """Of a file that a twin codes."""
    return f"{variant}{'' if sound else '-noise'}_{dtype}"


def twin_profile(directory, variant, dtype):
    """That of `write_twins`, with its model."""
    from decoding import HEAD_DIM, KV_HEADS, VOCAB

    from prolepsis.coding.profile_file import from_bytes
    from prolepsis.coding.twin_network import Target
    from prolepsis.model.config import ModelConfig
    from prolepsis.model.gguf_file import GGUFFile
    from prolepsis.model.weights import load_plan

    file = GGUFFile.open(directory / "twin.gguf")
    target = Target(load_plan(file, ModelConfig.from_gguf(file), 512, fast=False), KV_HEADS, HEAD_DIM, VOCAB)
    return from_bytes((directory / f"{variant}_{dtype}.profile").read_bytes(), variant).profile.bound_to(target)


def write_twin_files(directory, folder):
    """A session file for each of TWINS."""
    from prolepsis.coding import encode

    for variant, dtype, sound in TWINS:
        name, profile = twin_name(variant, dtype, sound), twin_profile(directory, variant, dtype)
        with np.load(directory / f"{name}.npz") as text:
            data = encode(text["kv"], dtype=dtype, rope=profile.rope, token_ids=text["ids"], profile=profile)
        (directory / folder / f"{name}.pkv").write_bytes(data)


def write_files(directory, folder):
    """A session file for each cache dtype and predictor, in streams of 32 lanes and of 4."""
    from kv_samples import ROPE, realistic_kv
    from linear_samples import linear_kv

    from prolepsis.coding import SessionWriter, encode, measure
    from prolepsis.coding.cache_dtypes import TOKEN_DTYPES

    (directory / folder).mkdir()
    for dtype in TOKEN_DTYPES:
        kv = realistic_kv(layers=1, tokens=270, heads=2, dim=32, dtype=dtype, start=32)
        (directory / folder / f"static_{dtype}.pkv").write_bytes(
            encode(as_tensor(kv, dtype), dtype=dtype, rope=ROPE, start=32)
        )
        predicted, ids = linear_kv(270, dtype)
        profile = bound_profile(directory, dtype)
        for name, values, given in (
            ("marginal", kv, measure(kv, dtype, None, 0, "marginal")),
            ("linear", predicted, profile),
        ):
            file = BytesIO()
            writer = SessionWriter(file, given, dtype=dtype, rope=profile.rope if name == "linear" else None)
            writer.add(values, ids)
            writer.finish()
            (directory / folder / f"{name}_{dtype}.pkv").write_bytes(file.getvalue())
    write_twin_files(directory, folder)


def bound_profile(directory, dtype):
    """That of `write_profiles`."""
    from linear_samples import VOCABULARY, rows

    from prolepsis.coding.profile_file import from_bytes

    return from_bytes((directory / f"{dtype}.profile").read_bytes(), dtype).profile.bound_to(rows, VOCABULARY)


def as_tensor(kv, dtype):
    """A tensor of torch, where it was told which instructions to use; else the array itself."""
    if "ATEN_CPU_CAPABILITY" not in os.environ or dtype not in ("bf16", "fp16"):
        return kv
    import torch

    return torch.from_numpy(kv.view(np.int16)).view({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])


def values_of_files(directory, folder):
    """Of every file, in the order of their names."""
    from prolepsis.coding import SessionReader
    from prolepsis.coding.cache_dtypes import arrays_of

    for path in sorted((directory / folder).iterdir()):
        predictor, dtype = path.stem.split("_", 1)
        profile = None
        if predictor == "linear":
            profile = bound_profile(directory, dtype)
        elif predictor.startswith("twin"):
            profile = twin_profile(directory, predictor.removesuffix("-noise"), dtype)
        yield from arrays_of(SessionReader(path.read_bytes(), profile=profile).read_all())


def hash_of(arrays):
    """SHA-256 of finite numbers."""
    digest = hashlib.sha256()
    for array in arrays:
        assert np.isfinite(array).all()
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def result_hash(length, directory):
    """That of the results of one of the functions above, which may write into `directory`."""
    works = {"short": short, "kinds": every_kind, "whole": whole, "streams": streams, "coding": coding}
    return hash_of(works[length](directory))


if __name__ == "__main__":
    print(result_hash(sys.argv[1], Path(sys.argv[2])))
