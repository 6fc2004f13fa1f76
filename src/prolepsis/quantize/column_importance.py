"""How much the columns of a model's matrices count, as a user gives it: llama.cpp's i-matrix."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.model.config import ModelConfig
from prolepsis.quantize.layer import shapes, tensor_name
from prolepsis.quantize.options import Options

Importance = Mapping[str, NDArray[np.float32]]
"""float32 [columns] by canonical name: the mean square of what each column is multiplied by."""

_AROUND = ("token_embd.weight", "output.weight")


def checked(imatrix: Importance | None, config: ModelConfig, options: Options, with_texts: bool) -> Importance:
    """The same, or nothing for None. Raises InputError where it is of another model, or changes nothing."""
    if imatrix is None:
        return {}
    if not options.weighs_errors:
        raise InputError("--imatrix is for --format gguf --method rtn and a --type other than F16 and BF16")
    if with_texts:
        raise InputError("--imatrix says what --calibration is to find out: give one of them")
    wanted = {
        tensor_name(layer, part): columns
        for layer in range(config.num_layers)
        for part, (_, columns) in shapes(config).items()
    }
    known = wanted | dict.fromkeys(_AROUND, config.hidden_size)
    for name in sorted(wanted.keys() - imatrix.keys())[:1]:
        raise InputError(f"--imatrix: {name} of the model is missing in it")
    for name, values in imatrix.items():
        if name not in known:
            raise InputError(f"--imatrix: the model has no matrix {name}; it is of another model")
        if values.shape != (known[name],):
            raise InputError(f"--imatrix: {name} has {values.size} values, and the model {known[name]} columns")
    return imatrix


def digest(values: NDArray[Any]) -> str:
    """Hash of an array's bytes, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).data)
