"""A model quantised by GPTQModel's GPTQ, on the calibration tokens that `prolepsis quantize` takes of the same texts.

    python -P benchmarks/gptqmodel_reference.py MODEL_DIRECTORY OUTPUT --calibration TEXT [--bits 4] [--group-size 128]
    prolepsis quantize MODEL_DIRECTORY -o OURS --no-act-order --group-size 128 --calibration TEXT
    prolepsis ppl HELD_OUT --model MODEL_DIRECTORY --compare OURS --compare OUTPUT

Needs `pip install gptqmodel` (seen with 7.7), which brings a torch of its own: best in an environment of its own. `-P`
keeps `kernels.py` beside this file from being taken for a package that transformers looks for.
"""

import argparse
import os
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from prolepsis.quantize.samples import pieces

_WORKERS = 8  # GPTQModel wants more than a small machine has


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("model", type=Path)
    flags.add_argument("output", type=Path)
    flags.add_argument("--calibration", type=Path, action="append", required=True)
    flags.add_argument("--bits", type=int, default=4)
    flags.add_argument("--group-size", type=int, default=128)
    flags.add_argument("--act-order", action="store_true")
    flags.add_argument("--samples", type=int, default=128)
    flags.add_argument("--length", type=int, default=512)
    flags.add_argument("--seed", type=int, default=0)
    arguments = flags.parse_args()
    os.cpu_count = lambda: _WORKERS
    from gptqmodel import GPTQModel, QuantizeConfig

    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    texts = [tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False).ids for path in arguments.calibration]
    tokens = pieces(texts, arguments.samples, arguments.length, arguments.seed)
    rows = [{"input_ids": row.tolist(), "attention_mask": np.ones_like(row).tolist()} for row in tokens]
    config = QuantizeConfig(bits=arguments.bits, group_size=arguments.group_size, desc_act=arguments.act_order)
    model = GPTQModel.load(str(arguments.model), config, device="cpu")
    model.quantize(rows, batch_size=1)
    model.save(str(arguments.output))


if __name__ == "__main__":
    main()
