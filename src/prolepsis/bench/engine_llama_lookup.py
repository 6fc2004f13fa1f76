"""llama.cpp with the lookup decoding of llama-cpp-python, to be measured; see `measure.Answering` for the methods."""

from collections.abc import Generator, Sequence

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from prolepsis.bench.engines import Setup


class Lookup2:
    """Two drafts at a time, which its authors recommend on CPUs."""

    drafts = 2

    def __init__(self, setup: Setup) -> None:
        self._llama = Llama(
            setup.model,
            n_ctx=setup.context,
            n_threads=setup.threads,
            n_threads_batch=setup.threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=self.drafts),
            logits_all=True,  # it needs them, and does not ask for room for them by itself
            verbose=False,
        )

    def answer(self, prompt: Sequence[int]) -> Generator[int, None, None]:
        yield from self._llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0)


class Lookup10(Lookup2):
    """Ten drafts at a time, the default."""

    drafts = 10
