"""The other process of the demonstration: restore a session, compare every bit, continue it.

python -m prolepsis.demo.restore MODEL SESSION ORIGINAL.npy PROFILE [THREADS] prints one JSON object. PROFILE is a file,
or - for a session that brings its own.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from prolepsis.engine.llm import LLM
from prolepsis.engine.profiles import load_profile
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.session import load_session
from prolepsis.kv.stored import values_of

CONTINUATION = 32  # tokens by which both processes continue the session


def continue_greedily(llm: LLM, sequence: Sequence, count: int) -> list[int]:
    """The next `count` most probable tokens, whatever they are."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    request = llm.new_request(sequence, params)
    for _ in llm.run(request):
        pass
    return request.completion.token_ids


def _main(model: str, session: str, original: str, profile: str, threads: str | None = None) -> None:
    llm = LLM(model, threads=None if threads is None else int(threads))
    coded_with = None if profile == "-" else load_profile(profile, llm, "bf16")
    load_session(
        Path(session), llm, profile=coded_with
    ).sequence.release()  # loads compiled code, which is not measured
    start = time.perf_counter()
    saved = load_session(Path(session), llm, profile=coded_with)
    restore_s = time.perf_counter() - start
    sequence = saved.sequence
    expected = np.load(original, mmap_mode="r", allow_pickle=False)
    restored = values_of(llm.kv_cache.read(sequence.table, 0, sequence.num_cached))
    outcome = {
        "restore_s": restore_s,
        "bit_identical": restored.shape == expected.shape and bool((restored == expected).all()),
        "continuation": continue_greedily(llm, sequence, CONTINUATION),
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    _main(*sys.argv[1:])
