"""What calibrating the `linear` predictor buys, by the number of tokens, and how it holds on other kinds of text.

Calibrates on Python's own language reference (which every CPython carries) and codes what it has not seen: more of
the reference, Python code, and the short texts of `reference_texts.py` in other languages. Beside it stands `static`,
measured on the very text.
"""

import argparse
import inspect
from pydoc_data.topics import topics
from typing import Any

import measuring
from reference_texts import TEXTS

from prolepsis import LLM
from prolepsis.coding.cache_dtypes import DType
from prolepsis.coding.profile_file import CalibratedProfile
from prolepsis.engine.profiles import calibrate, collect, compare, kv_of_texts

_WINDOW = 2048


def sample(llm: LLM, ids: list[int], dtype: DType, tokens: int) -> Any:
    """A calibration sample of up to `tokens` of the ids."""
    tokens = min(tokens, len(ids))
    return collect(llm, kv_of_texts(llm, [ids], dtype, _WINDOW, tokens), dtype, tokens)


def checked_texts(llm: LLM, reference: list[int], tokens: int) -> dict[str, list[int]]:
    """Name and tokens of each text to code."""
    texts = {"reference, other pages": reference[-tokens:]}
    texts["Python code"] = llm.tokenizer.encode(inspect.getsource(argparse))[:tokens]
    return texts | {language: llm.tokenizer.encode(text) for language, text in TEXTS.items() if language != "English"}


def main() -> None:
    arguments = measuring.parser(__doc__)
    arguments.add_argument("--model", default="smollm2:135m")
    arguments.add_argument("--kv-dtype", default="bf16")
    arguments.add_argument("--tokens", type=measuring.numbers, default=[1024, 2048, 4096, 8192, 16384, 32768])
    arguments.add_argument("--check-tokens", type=int, default=4096)
    arguments = arguments.parse_args()
    dtype: DType = arguments.kv_dtype
    llm = LLM(arguments.model, threads=arguments.threads, kv_dtype="fp16" if dtype == "fp16" else "bf16")
    reference = llm.tokenizer.encode("\n\n".join(topics.values()))
    profiles: dict[int, CalibratedProfile] = {}
    for tokens in arguments.tokens:
        with sample(llm, reference[: -arguments.check_tokens], dtype, tokens) as calibration:
            profiles[calibration.tokens] = calibrate(llm, calibration, "linear")
    rows = []
    for name, ids in checked_texts(llm, reference, arguments.check_tokens).items():
        with sample(llm, ids, dtype, len(ids)) as text:
            outcomes = {tokens: compare(profile, text) for tokens, profile in profiles.items()}
        first = next(iter(outcomes.values()))
        rates = {f"{tokens} tokens": outcome.ratio for tokens, outcome in outcomes.items()}
        rows.append({"text": name, "tokens": first.tokens, "static": first.uncalibrated_ratio} | rates)
    measuring.report(f"ratio of linear by tokens of calibration, {arguments.model}, {dtype}", rows, arguments)


if __name__ == "__main__":
    main()
