"""llama.cpp through its C interface in llama-cpp-python, to be measured; see `measure.Engine` for the methods."""

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import llama_cpp
import numpy as np

from prolepsis.bench.engines import Setup

_BATCH = 2048  # llama.cpp's own default of tokens in a call, which it cuts into 512


class LlamaCpp:
    """llama.cpp with its own defaults, as llama-bench and llama-server have them, and all work on the CPU."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        llama_cpp.llama_log_set(_silent, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(setup.model.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {setup.model}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._single = self._new_context(1, setup.context)
        self._position = 0
        self._shape, self._shared = (0, 0), None

    def prefill(self, tokens: Sequence[int]) -> None:
        self._start(tokens)

    def answer(self, prompt: Sequence[int]) -> Generator[int, None, None]:
        token = self._start(prompt)
        while True:
            yield token
            token = self._run(self._single, [(token, self._position, 0, True)])[0]
            self._position += 1

    def _start(self, tokens: Sequence[int]) -> int:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._single), True)
        self._position = len(tokens)
        return self._read(self._single, [tokens])[0]

    def decode(self, token: int) -> None:
        self._run(self._single, [(token, self._position, 0, True)])
        self._position += 1

    def serve(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """As llama-server does it: prompts in full batches, then a token of every sequence in each call."""
        context = self._context_for(len(prompts), max(map(len, prompts)) + new_tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens = self._read(context, prompts)
        for step in range(new_tokens - 1):
            ends = (len(prompt) + step for prompt in prompts)
            rows = enumerate(zip(tokens, ends, strict=True))
            tokens = self._run(context, [(token, end, number, True) for number, (token, end) in rows])

    def _read(self, context: Any, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The most probable token after each prompt."""
        rows = [
            (token, position, number, position + 1 == len(prompt))
            for number, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        return [token for i in range(0, len(rows), _BATCH) for token in self._run(context, rows[i : i + _BATCH])]

    def _context_for(self, sequences: int, length: int) -> Any:
        """One with room for so many sequences of that length, kept for the next."""
        if sequences > self._shape[0] or length > self._shape[1]:
            if self._shared is not None:
                llama_cpp.llama_free(self._shared)
            self._shape = max(sequences, self._shape[0]), max(length, self._shape[1])
            self._shared = self._new_context(self._shape[0], self._shape[0] * self._shape[1])
        return self._shared

    def _new_context(self, sequences: int, tokens: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = tokens, sequences, _BATCH
        params.n_threads = params.n_threads_batch = self._setup.threads
        params.no_perf = True
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp has no room for {sequences} sequences of {tokens} tokens together")
        return context

    def _run(self, context: Any, rows: Iterable[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wanted) rows; returns the most probable token after each wanted one."""
        batch, wanted, count = self._batch, [], 0
        for row, (token, position, sequence, want) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.seq_id[row][0] = token, position, sequence
            batch.n_seq_id[row], batch.logits[row] = 1, want
            count = row + 1
            if want:
                wanted.append(row)
        batch.n_tokens = count
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = (llama_cpp.llama_get_logits_ith(context, row) for row in wanted)
        return [int(np.ctypeslib.as_array(each, (self._vocab,)).argmax()) for each in logits]


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    pass
