"""Running everything once, so that nothing is compiled later."""

import tempfile
from pathlib import Path

from prolepsis.engine.llm import LLM
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import load_session, save_session

_TOKENS = 20  # a short session, though with tokens of a prompt and of an answer


def warm_up(llm: LLM) -> None:
    """Compile every kernel that requests to `llm` and sessions can need. Leaves nothing in its cache."""
    params = SamplingParams(
        top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=1, max_tokens=2, ignore_eos=True
    )
    sequence = llm.runner.new_sequence([0] * min(_TOKENS, llm.max_context - 1))
    try:
        for _ in llm.run(llm.new_request(sequence, params)):
            pass
        with tempfile.TemporaryDirectory(prefix="prolepsis-") as directory:
            path = Path(directory, "session.pkv")
            save_session(path, llm, sequence)
            sequence.release()
            load_session(path, llm).sequence.release()
    finally:
        sequence.release()
