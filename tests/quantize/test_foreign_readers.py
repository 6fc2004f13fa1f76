"""Other engines load what `quantise` makes, and compute with it what we do."""

from pathlib import Path

import numpy as np
import pytest

from prolepsis import LLM
from prolepsis.engine.perplexity import log_softmax
from prolepsis.model.model_file import open_model
from prolepsis.quantize.job import quantise
from prolepsis.quantize.options import Options

FLOATS = Path(__file__).parents[1] / "data" / "gguf" / "F32.gguf"
TOKENS = 64


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "BF16"])
def test_llama_cpp_reads_gguf_files(type_name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python (extra `engines`) is not installed")
    place = tmp_path / "made.gguf"
    quantise(open_model(FLOATS), Options(method="rtn", gguf_type=type_name), [], place)
    ours = LLM(place, max_context=256)
    tokens = ours.tokenizer.encode(Path(__file__).read_text())[:TOKENS]
    theirs = llama_cpp.Llama(str(place), n_ctx=256, logits_all=True, verbose=False)
    theirs.eval(tokens)
    expected = log_softmax(np.array(theirs.scores[:TOKENS], np.float32))
    found = log_softmax(ours.runner.all_logits(ours.runner.new_sequence(tokens)))
    assert np.mean(np.sum(np.exp(expected) * (expected - found), axis=1)) < 1e-3
