"""Running everything once, so that nothing is compiled later."""

import tempfile
from pathlib import Path

from prolepsis.engine.kernel_cache import remove_unused
from prolepsis.engine.llm import LLM
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import load_session, save_session

_VALUES = 1 << 22  # K and V from which on a session gets tables of its own (`coding.profile`)


def warm_up(llm: LLM) -> None:
    """Compile every kernel that requests to `llm` and its sessions can need. Leaves nothing in its cache.

    Kernels of other installations go, if nobody has used them for long (`kernel_cache`): one more set takes their room.
    """
    remove_unused()
    params = SamplingParams(
        top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=1, max_tokens=2, ignore_eos=True
    )
    values_per_token = 2 * llm.config.num_layers * llm.config.num_kv_heads * llm.config.head_dim
    sequence = llm.runner.new_sequence([0] * min(_VALUES // values_per_token + 1, llm.max_context - 1))
    try:
        for _ in llm.run(llm.new_request(sequence, params)):
            pass
        if llm.runner.eviction is not None:
            return
        with tempfile.TemporaryDirectory(prefix="prolepsis-") as directory:
            path = Path(directory, "session.pkv")
            save_session(path, llm, sequence)
            sequence.release()
            load_session(path, llm).sequence.release()
    finally:
        sequence.release()
