"""Makes a quantised model: layer by layer, on from where an earlier run was stopped, whole or not at all."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.model.config import rows_for
from prolepsis.model.model_file import ModelFile
from prolepsis.quant.matrix import RowsOf
from prolepsis.quantize.checkpoint_layout import CheckpointLayout
from prolepsis.quantize.column_importance import Importance, checked, digest
from prolepsis.quantize.gguf_layout import GGUFLayout
from prolepsis.quantize.layer import NORMS, shapes, tensor_name
from prolepsis.quantize.layouts import Layout
from prolepsis.quantize.mixed import Measure, choose
from prolepsis.quantize.options import Options
from prolepsis.quantize.original import checkpoint_files, gguf_metadata
from prolepsis.quantize.packings import AwqPacking, Exl2Packing, GptqPacking, Packing
from prolepsis.quantize.place import Place
from prolepsis.quantize.report import Report, entry, rows_of
from prolepsis.quantize.samples import pieces
from prolepsis.quantize.walk import LayerResult, Progress, embedded, walk
from prolepsis.quantize.work import Work, work_directory

_FEW_TOKENS = 4096
_FORMAT = 2  # of the work directory; raised when its files, or what methods make, change


def quantise(
    original: ModelFile,
    options: Options,
    texts: Sequence[str],
    output: Path,
    *,
    force: bool = False,
    restart: bool = False,
    imatrix: Importance | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Report:
    """Quantise `original` into `output`: a directory, or a GGUF file where the options name a type of those.

    texts: to calibrate on. force: replace an older model at `output`. restart: do not go on with another command's
    work. imatrix: how much columns count, in place of texts (`model.imatrix.read_imatrix`). progress: called as stages
    of layers are done. note: told what else a user should know. What is done so far lies in `output` with ".part" at
    the end; a run that is stopped leaves it, and the same call goes on with it.

    Raises InputError for options, texts or places that cannot be used, ModelFileError for weights that cannot be.
    """
    start = time.perf_counter()
    options.check()
    place = Place(output, original, options.gguf_type is not None, force)
    place.check()
    options.check_model(original.config)
    importance = checked(imatrix, original.config, options, bool(texts))
    layout = _layout(original, options, importance)
    layout.check(shapes(original.config))
    tokens = _tokens(original, options, texts)
    if tokens is not None and tokens.size < _FEW_TOKENS:
        note(f"{tokens.size} tokens are few to calibrate on; some 50,000 do better")
    manifest = {
        "format": _FORMAT,
        "model": original.fingerprint(),
        "calibration": None if tokens is None else [*tokens.shape, digest(tokens.astype("<i8"))],
        "imatrix": [[name, digest(values.astype("<f4"))] for name, values in sorted(importance.items())],
        **options.settings(),
    }
    with work_directory(place.work, manifest, restart) as work:
        _do_layers(original, options, layout, tokens, importance, work, progress, note)
        entries = _finish(original, layout, work)
        nbytes = place.take(work.made)
        work.remove()
    rows, layers = rows_of(entries)
    seconds = time.perf_counter() - start
    return Report(str(output), nbytes, seconds, 0 if tokens is None else tokens.size, rows, layers)


def _layout(original: ModelFile, options: Options, importance: Importance) -> Layout:
    if options.gguf_type is not None:
        factors = original.config.rope.frequency_factors
        return GGUFLayout(options.gguf_type, gguf_metadata(original), factors, importance)
    return CheckpointLayout(_packing(original, options), checkpoint_files(original))


def _packing(original: ModelFile, options: Options) -> Packing:
    """AWQ's own layout has 4 bits and zero points; its matrices otherwise are in GPTQ's."""
    if options.method == "mixed":
        return Exl2Packing(options.bits)
    group = options.fitting_group(original.config)
    if options.method == "awq" and options.bits == 4:
        return AwqPacking(group)
    return GptqPacking(int(options.bits), group, options.is_symmetric, options.is_ordered)


def _tokens(original: ModelFile, options: Options, texts: Sequence[str]) -> NDArray[np.int64] | None:
    """Calibration tokens, int64 [pieces, length]."""
    if texts and not options.uses_texts:
        type_name = "" if options.gguf_type is None else f" to {options.gguf_type}"
        raise InputError(f"--calibration: --method {options.method}{type_name} does not look at texts; leave it out")
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
    importance: Importance,
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
    walker = options.walker(config, recipes, importance)
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
        moved = matrix if rows is None else RowsOf(matrix, rows).held()
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


def _finish(original: ModelFile, layout: Layout, work: Work) -> list[dict[str, object]]:
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
    if work.made.is_dir():
        shutil.rmtree(work.made)
    layout.write(work.made, [*around[:1], *layers, norm, *around[1:]])
    return entries
