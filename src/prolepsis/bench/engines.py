"""The engines that can be measured: ours, and each peer that is installed."""

import importlib.util
from collections.abc import Callable, Sequence

from prolepsis.bench.measure import Engine
from prolepsis.engine.llm import LLM


class Prolepsis:
    """This engine."""

    def __init__(self, model: str, threads: int, context: int) -> None:
        self.threads = threads
        llm = LLM(model, threads=threads, max_context=context)
        self._runner = llm.runner
        self._sequence = self._runner.new_sequence()

    def prefill(self, tokens: Sequence[int]) -> None:
        """See `Engine`."""
        self._sequence.release()
        self._sequence = self._runner.new_sequence(tokens)
        self._runner.prefill(self._sequence)

    def decode(self, token: int) -> None:
        """See `Engine`."""
        self._sequence.tokens.append(token)
        self._runner.step([self._sequence])


class LlamaCpp:
    """llama.cpp through llama-cpp-python, as its wheel or build comes, with its default batch of 512."""

    def __init__(self, model: str, threads: int, context: int) -> None:
        import llama_cpp

        self.threads = threads
        self._llama = llama_cpp.Llama(
            model, n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
        )

    def prefill(self, tokens: Sequence[int]) -> None:
        """See `Engine`."""
        self._llama.reset()
        self._llama.eval(list(tokens))

    def decode(self, token: int) -> None:
        """See `Engine`."""
        self._llama.eval([token])


ENGINES: dict[str, Callable[[str, int, int], Engine]] = {"prolepsis": Prolepsis, "llama.cpp": LlamaCpp}
_MODULES = {"prolepsis": "prolepsis", "llama.cpp": "llama_cpp"}


def installed() -> list[str]:
    """Names of the engines that can be measured here, ours first."""
    return [name for name in ENGINES if importlib.util.find_spec(_MODULES[name]) is not None]
