"""The walk through a model that quantises it, one layer after the other.

Hidden states of all calibration sequences go along. Each layer gets what the quantised layers below it make of the
texts, so later layers make up for earlier errors, as in GPTQ (Frantar et al. 2022, arXiv:2210.17323, section 3.3).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError, ModelFileError
from prolepsis.model.config import ModelConfig
from prolepsis.model.weights import Source
from prolepsis.quant.matrix import HeldMatrix, whole
from prolepsis.quantize.layer import NORMS, STAGES, Floats, Layer, tensor_name

Progress = Callable[[int, int], None]
"""Called with the number of stages that are done, and of all."""


class Method(Protocol):
    """How a layer becomes a quantised one."""

    def prepare(self, layer: Layer) -> None:
        """Look at a layer before it is begun; its weights and norms may be replaced by others of the same function."""
        ...

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        """The matrices of a stage, by their part, once all before it are what they will be; others stay as they are."""
        ...


class LayerResult(NamedTuple):
    """A layer that is done.

    matrices, vectors: by canonical name; vectors are norms that changed, float32 [hidden]. hidden: float32 [sequences,
    length, hidden], what comes out of the layer, or None without calibration; the walk goes on with this array, so save
    it before asking for more.
    """

    layer: int
    matrices: dict[str, HeldMatrix]
    vectors: dict[str, Floats]
    hidden: Floats | None


def embedded(source: Source, config: ModelConfig, tokens: NDArray[np.int64], out: Floats | None = None) -> Floats:
    """Hidden states of `tokens` int64 [sequences, length] before the first layer, float32 [sequences, length, hidden].

    out: where they go, such as a memory-mapped file. Raises InputError for tokens that the model does not have.
    """
    if tokens.ndim != 2 or not tokens.size:
        raise InputError(f"calibration needs tokens of shape (sequences, length), got {tokens.shape}")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise InputError(f"calibration tokens must be from 0 to {config.vocab_size - 1}")
    if out is None:
        out = np.empty((*tokens.shape, config.hidden_size), np.float32)
    matrix = source.matrix("token_embd.weight", (config.vocab_size, config.hidden_size))
    for sequence, ids in enumerate(tokens):
        used, places = np.unique(ids, return_inverse=True)
        out[sequence] = whole(matrix, used)[places]
    return out


def walk(
    source: Source,
    config: ModelConfig,
    method: Method,
    hidden: Floats | None = None,
    start: int = 0,
    progress: Progress | None = None,
) -> Iterator[LayerResult]:
    """Quantise the layers of `source` from `start` on.

    hidden: what comes into layer `start`, of `embedded` or of an earlier `LayerResult`; changed in place. None: without
    calibration, for methods that can do without. Raises ModelFileError for weights that are missing or not finite, and
    where hidden states stop being numbers.
    """
    stages = len(STAGES) * (config.num_layers - start)
    for index in range(start, config.num_layers):
        layer = Layer.read(source, config, index, hidden)
        before = dict(layer.norms)
        method.prepare(layer)
        matrices: dict[str, HeldMatrix] = {}
        for stage in range(len(STAGES)):
            made = method.quantise(layer, stage)
            layer.weights.update({part: whole(matrix) for part, matrix in made.items()})
            matrices |= {tensor_name(index, part): matrix for part, matrix in made.items()}
            if stage == 1:
                layer.attend()
            if progress is not None:
                progress(len(STAGES) * (index - start) + stage + 1, stages)
        layer.feed()
        if hidden is not None and not np.isfinite(hidden).all():
            raise ModelFileError(f"layer {index} makes numbers that are not finite of the calibration texts")
        changed = {
            tensor_name(index, part): layer.norms[part] for part in NORMS if layer.norms[part] is not before[part]
        }
        yield LayerResult(index, matrices, changed, hidden)
