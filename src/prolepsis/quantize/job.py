"""Makes a quantised model: layer by layer, on from where an earlier run was stopped, whole or not at all."""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.model.model_file import ModelFile
from prolepsis.quantize.checkpoint_layout import CheckpointLayout
from prolepsis.quantize.gguf_layout import GGUFLayout
from prolepsis.quantize.layer import NORMS, shapes, tensor_name
from prolepsis.quantize.layouts import Layout, MovedRows
from prolepsis.quantize.mixed import Measure, choose
from prolepsis.quantize.names import rows_for
from prolepsis.quantize.options import Options
from prolepsis.quantize.original import checkpoint_files, gguf_metadata
from prolepsis.quantize.packings import AwqPacking, Exl2Packing, GptqPacking, Packing
from prolepsis.quantize.report import Report, entry, rows_of
from prolepsis.quantize.samples import pieces
from prolepsis.quantize.walk import LayerResult, Progress, embedded, walk
from prolepsis.quantize.work import Work, work_directory

_FORMAT = 1  # of the work directory; raised when its files, or what methods make, change


def quantise(
    original: ModelFile,
    options: Options,
    texts: Sequence[str],
    output: Path,
    *,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Report:
    """Quantise `original` into `output`: a directory, or a GGUF file where the options name a type of those.

    texts: to calibrate on. force: replace an older model at `output`. restart: do not go on with another command's
    work. progress: called as stages of layers are done. note: told what else a user should know. What is done so far
    lies in `output` with ".part" at the end; a run that is stopped leaves it, and the same call goes on with it.

    Raises InputError for options, texts or places that cannot be used, ModelFileError for weights that cannot be.
    """
    start = time.perf_counter()
    options.check()
    _check_output(output, original.path, force)
    layout = _layout(original, options)
    layout.check(shapes(original.config))
    tokens = _tokens(original, options, texts)
    manifest = {
        "format": _FORMAT,
        "model": original.fingerprint(),
        "calibration": None if tokens is None else xxhash.xxh3_128_hexdigest(tokens.astype("<i8").tobytes()),
        **asdict(options),
    }
    work_path = output.with_name(output.name + ".part")
    with work_directory(work_path, manifest, restart) as work:
        _do_layers(original, options, layout, tokens, work, progress, note)
        entries = _finish(original, layout, work, output)
        nbytes = _put_in_place(work.path / "model", output)
    shutil.rmtree(work_path, ignore_errors=True)
    rows, layers = rows_of(entries)
    seconds = time.perf_counter() - start
    return Report(str(output), nbytes, seconds, 0 if tokens is None else tokens.size, rows, layers)


def _check_output(output: Path, source: Path, force: bool) -> None:
    if not output.parent.is_dir():
        raise InputError(f"-o {output}: there is no directory {output.parent}")
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"-o {output}: the directory {output.parent} is write-protected")
    if not os.path.lexists(output):
        return
    if source.exists() and output.exists() and os.path.samefile(source, output):
        raise InputError(f"-o {output} is the model that is quantised; give another place")
    if not force:
        raise InputError(f"-o {output} exists; give another place, or --force to replace it")
    if output.is_dir() and any(output.iterdir()) and not (output / "config.json").exists():
        raise InputError(f"-o {output} is a directory that holds no model, and will not be replaced")


def _layout(original: ModelFile, options: Options) -> Layout:
    if options.gguf_type is not None:
        return GGUFLayout(options.gguf_type, gguf_metadata(original), original.config.rope.frequency_factors)
    return CheckpointLayout(_packing(original, options), checkpoint_files(original))


def _packing(original: ModelFile, options: Options) -> Packing:
    """AWQ's own layout has 4 bits and zero points; its matrices otherwise are in GPTQ's."""
    if options.method == "mixed":
        return Exl2Packing(options.bits)
    group = options.fitting_group(original.config)
    if options.method == "awq" and options.bits == 4:
        return AwqPacking(group)
    ordered = options.act_order and options.method == "gptq"
    return GptqPacking(int(options.bits), group, options.is_symmetric, ordered)


def _tokens(original: ModelFile, options: Options, texts: Sequence[str]) -> NDArray[np.int64] | None:
    """Calibration tokens, int64 [pieces, length]."""
    if texts and not options.uses_texts:
        raise InputError(f"--calibration: --method {options.method} does not look at texts; leave it out")
    if not texts and not options.needs_texts:
        return None
    if not texts:
        raise InputError(
            f"--method {options.method} looks at what the model computes of texts: give some like those it will meet, "
            "--calibration FILE (some 100 kB or more), or take --method rtn, which needs none"
        )
    encoded = [original.tokenizer.encode(text) for text in texts]
    return pieces(encoded, options.samples, min(options.length, original.config.max_context), options.seed)


def _do_layers(
    original: ModelFile,
    options: Options,
    layout: Layout,
    tokens: NDArray[np.int64] | None,
    work: Work,
    progress: Progress | None,
    note: Callable[[str], None],
) -> None:
    """All layers that are not done yet."""
    config = original.config
    done = work.finished_layers(tokens is not None)
    if done:
        note(f"going on after {done} of {config.num_layers} layers, which {work.path} holds")
    if done == config.num_layers:
        return
    recipes, measuring = None, 0
    if options.method == "mixed":
        assert tokens is not None
        measuring = 1
        errors = _measured(original, tokens, work, progress, note)
        recipes, _ = choose(config, errors, options.bits)
    hidden = None
    if tokens is not None:
        hidden = work.hidden(done) if done else embedded(original, config, tokens)
    walker = options.walker(config, recipes)
    for result in walk(original, config, walker, hidden, done, _part_of(progress, measuring, measuring + 1)):
        _keep(original, layout, work, result)


def _measured(
    original: ModelFile,
    tokens: NDArray[np.int64],
    work: Work,
    progress: Progress | None,
    note: Callable[[str], None],
) -> dict[str, list[float]]:
    """What each matrix loses by each recipe."""
    config = original.config
    done = work.measured_layers()
    if 0 < done < config.num_layers:
        note(f"going on after measuring {done} of {config.num_layers} layers")
    if done < config.num_layers:
        hidden = work.hidden(done, "measured") if done else embedded(original, config, tokens)
        measure = Measure()
        for result in walk(original, config, measure, hidden, done, _part_of(progress, 0, 2)):
            assert result.hidden is not None
            work.keep_errors(result.layer, measure.errors, result.hidden)
    return work.errors(config.num_layers)


def _part_of(progress: Progress | None, part: int, parts: int) -> Progress | None:
    """Progress of one of several walks of the same length."""
    if progress is None:
        return None
    told = progress
    return lambda done, total: told(part * total + done, parts * total)


def _keep(original: ModelFile, layout: Layout, work: Work, result: LayerResult) -> None:
    tensors, entries = [], []
    for name, matrix in result.matrices.items():
        rows = rows_for(name, original.config, layout.rope_style)
        moved = matrix if rows is None else MovedRows(matrix, rows).held()
        stored = layout.matrix(name, moved)
        tensors += stored
        entries.append(entry(name, matrix.shape, [form.kind for form in matrix.forms], stored))
    for part in NORMS:
        name = tensor_name(result.layer, part)
        values = result.vectors.get(name)
        if values is None:
            values = original.vector(name, original.config.hidden_size)
        tensors.append(layout.vector(name, values))
    work.keep_layer(result.layer, tensors, entries, result.hidden)


def _finish(original: ModelFile, layout: Layout, work: Work, output: Path) -> list[dict[str, object]]:
    """Write the whole model into the work directory."""
    config = original.config
    layers, entries = work.layers(config.num_layers)
    names = ["token_embd.weight"] if config.tied_embeddings else ["token_embd.weight", "output.weight"]
    around = []
    for name in names:
        stored = layout.embedding(name, original.matrix(name, (config.vocab_size, config.hidden_size)))
        around.append(stored)
        entries.append(entry(name, (config.vocab_size, config.hidden_size), [stored.dtype], [stored]))
    norm = layout.vector("output_norm.weight", original.vector("output_norm.weight", config.hidden_size))
    place = work.path / "model"
    if place.is_dir():
        shutil.rmtree(place)
    layout.write(place, [*around[:1], *layers, norm, *around[1:]])
    return entries


def _put_in_place(made: Path, output: Path) -> int:
    """Give what was made its name, in place of an older model if there is one; returns its size in bytes."""
    files = [path for path in made.iterdir() if path.is_file()] if made.is_dir() else [made]
    nbytes = sum(path.stat().st_size for path in files)
    old = output.with_name(f".{output.name}.{secrets.token_hex(4)}.old")
    if output.is_dir():
        output.rename(old)
    made.rename(output)
    shutil.rmtree(old, ignore_errors=True)
    return nbytes
