"""Write a GGUF file's model with bf16 matrices: a target with wide weights, where none can be fetched.

Values are those of the file, rounded to bf16. A model made of 4-bit weights is a special one: each block of 32 has 16
levels, so rounding it to the same format again changes next to nothing, and to another changes more than it would
have changed the original. `--dither` moves each weight at random within its own step, evenly: as far as
the first rounding may have moved it. What comes out is a worse model, whose weights are as hard to round as real ones.

    python benchmarks/make_bf16.py OUTPUT [--model MODEL] [--dither SEED]
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from prolepsis.model.pull import DEFAULT_MODEL, resolve

_BF16 = gguf.GGMLQuantizationType.BF16
_STEPPED = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0")]
_WRITTEN_BY_WRITER = ("GGUF.", "general.architecture", "general.file_type")


def steps(tensor: gguf.ReaderTensor) -> NDArray[np.float32]:
    """The step between two levels of each weight, float32 [rows, columns]: a half at the beginning of each block of 32.

    Ends the program for a type whose blocks begin otherwise.
    """
    if tensor.tensor_type not in _STEPPED:
        raise SystemExit(f"{tensor.name} is {tensor.tensor_type.name}; --dither knows Q4_0, Q4_1 and Q8_0")
    columns = int(tensor.shape[0])
    blocks = np.ascontiguousarray(tensor.data.reshape(len(tensor.data), columns // 32, -1)[..., :2])
    return np.abs(blocks.view(np.float16)[..., 0].astype(np.float32)).repeat(32, axis=1)


def dithered(tensor: gguf.ReaderTensor, values: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Each weight somewhere in the interval that rounding brings to it."""
    return values + steps(tensor) * rng.uniform(-0.5, 0.5, values.shape).astype(np.float32)


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """Every key but those that the writer sets itself."""
    for name, entry in reader.fields.items():
        if not name.startswith(_WRITTEN_BY_WRITER):
            inner = entry.types[-1] if entry.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], inner)


def convert(source: Path, output: Path, seed: int | None) -> None:
    """Write the model at `source` to `output`; `seed`: of the dither, or None for none."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(output, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    copy_metadata(reader, writer)
    rng = np.random.default_rng(seed)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
            continue
        if seed is not None:
            values = dithered(tensor, values, rng)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, _BF16), raw_dtype=_BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Convert as the arguments say."""
    arguments = argparse.ArgumentParser(description="Write a GGUF file's model with bf16 matrices.")
    arguments.add_argument("output", type=Path)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--dither", type=int, metavar="SEED")
    options = arguments.parse_args()
    convert(resolve(options.model), options.output, options.dither)


if __name__ == "__main__":
    main()
