"""The engine as a Python object: load a model, give it prompts, get completions."""

import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from functools import cached_property
from operator import index
from typing import cast

import numpy as np

from prolepsis.engine.request import Completion, Delta, Request
from prolepsis.engine.runner import CHUNK, Progress, Runner
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.sequence import Sequence
from prolepsis.errors import InputError
from prolepsis.kernels import compiled_before
from prolepsis.kernels.team import MAX_THREADS
from prolepsis.kv.cache import PagedKVCache
from prolepsis.model.chat_template import ChatTemplate, Message, encode_chat
from prolepsis.model.config import ModelConfig
from prolepsis.model.decoder import Decoder
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.pull import DEFAULT_MODEL, resolve
from prolepsis.model.tokenizer import Tokenizer

BLOCK_SIZE = 32
_LONGEST = 1 << 17  # tokens of context unless more are asked for: the tables of positions grow with it
_SHARE_OF_FREE_MEMORY = 4  # the cache takes at most one part in this of what is free, unless told otherwise

Prompt = str | Many[int]


class LLM:
    """A loaded model with its paged cache.

        llm = LLM("smollm2:135m")
        print(llm.generate("The KV cache is", SamplingParams(max_tokens=20))[0].text)

    Not for use by two threads at once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        max_context: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: str = "bf16",
        threads: int | None = None,
        on_download: Callable[[int, int], None] | None = None,
    ) -> None:
        """
        model: a GGUF file, a registered name, or a Hugging Face repository (`prolepsis.model.pull`).
        max_context: longest sequence in tokens; by default what the model was trained for, up to 131,072.
        kv_memory: bytes for the KV cache; by default enough for one longest sequence, within a quarter of free memory.
        kv_dtype: "bf16" or "fp16".
        threads: by default one for each core.

        Raises InputError for a model or setting that cannot be used.
        """
        _check_threads(threads)
        self.path = resolve(os.fspath(model), progress=on_download)
        self.name = os.fspath(model)
        self._file = GGUFFile.open(self.path)
        self.config = ModelConfig.from_gguf(self._file)
        self._cache = self._new_cache(max_context, kv_memory, kv_dtype)
        self.max_context = min(
            max_context or min(self.config.max_context, _LONGEST), self._cache.pool.num_blocks * self._cache.block_size
        )
        self.runner = Runner(Decoder(self._file, self.config, self.max_context, CHUNK, threads), self._cache)

    def _new_cache(self, max_context: int | None, kv_memory: int | None, dtype: str) -> PagedKVCache:
        config = self.config
        if max_context is not None and not 2 <= max_context <= config.max_context:
            raise InputError(
                f"max_context must be in 2 .. {config.max_context}, what {self.name} was trained for, not {max_context}"
            )
        shape = (config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        budget = _free_memory() // _SHARE_OF_FREE_MEMORY if kv_memory is None else kv_memory
        blocks = PagedKVCache.num_blocks_for(budget, *shape)
        if kv_memory is None:
            blocks = min(blocks, -(-(max_context or min(config.max_context, _LONGEST)) // BLOCK_SIZE))
        return PagedKVCache(*shape, blocks, dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelFileError where the file has none that is supported."""
        return Tokenizer.from_gguf(self._file)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises ModelFileError where the file has none."""
        return ChatTemplate.from_gguf(self._file)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model file, weights and metadata alike."""
        return self._file.fingerprint()

    @property
    def kv_cache(self) -> PagedKVCache:
        """The cache all sequences share."""
        return self._cache

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises InputError for one that is empty or too long, or ids beyond the vocabulary."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        self.check_prompt(tokens)
        return tokens

    def check_prompt(self, tokens: Many[int]) -> None:
        """Raises InputError unless `tokens` can be continued by at least one token."""
        if not tokens:
            raise InputError("the prompt is empty")
        if len(tokens) >= self.max_context:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, but the context holds {self.max_context} "
                "and the answer needs room too; shorten the prompt, or raise max_context or kv_memory where the model "
                f"allows it (it was trained for {self.config.max_context})"
            )
        beyond = next((t for t in tokens if not 0 <= t < self.config.vocab_size), None)
        if beyond is not None:
            raise InputError(f"token id {beyond} is outside the vocabulary of {self.config.vocab_size}")

    def generate(self, prompts: Prompt | Many[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Complete one prompt or several (texts, or lists of token ids); one completion for each, in order.

        Several run together, as many at a time as the cache has room for.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
        encoded = [self.encode(prompt) for prompt in cast(Many[Prompt], [prompts] if single else prompts)]
        params = params or SamplingParams()
        completions: list[Completion] = []
        while len(completions) < len(encoded):
            batch = self._that_fit(encoded[len(completions) :], params)
            completions += self._run_together(batch, params)
        return completions

    def encode_chat(self, messages: Many[Message]) -> list[int]:
        """Token ids of a conversation that the assistant is to continue. Raises InputError as `encode` does."""
        tokens = encode_chat(self.tokenizer, self.chat_template, messages)
        self.check_prompt(tokens)
        return tokens

    def run(self, request: Request, progress: Progress | None = None) -> Iterator[Delta]:
        """Run one request token by token. Closing the iterator stops it; its sequence keeps what it has."""
        logits = self.runner.prefill(request.sequence, progress)
        while True:
            delta = request.accept(logits)
            yield delta
            if delta.finish_reason is not None:
                return
            logits = self.runner.step([request.sequence])[0]

    def new_request(self, sequence: Sequence, params: SamplingParams) -> Request:
        """A request that continues `sequence`. Raises InputError if it leaves no room for an answer."""
        self.check_prompt(sequence.tokens)
        tokenizer = self.tokenizer if "tokenizer.ggml.model" in self._file.metadata else None
        return Request(sequence, params, tokenizer, self.config.vocab_size, self.max_context)

    @property
    def needs_compiling(self) -> bool:
        """Whether the first pass will have to compile the kernels for this CPU (once per machine and version)."""
        return not compiled_before()

    def _that_fit(self, prompts: Many[list[int]], params: SamplingParams) -> Many[list[int]]:
        """The first prompts whose longest outcome the free blocks can hold together; at least one."""
        free = self._cache.pool.num_free
        for count, prompt in enumerate(prompts):
            free -= -(-min(len(prompt) + params.max_tokens, self.max_context) // self._cache.block_size)
            if free < 0:
                return prompts[: max(count, 1)]
        return prompts

    def _run_together(self, prompts: Many[list[int]], params: SamplingParams) -> list[Completion]:
        requests = [self.new_request(self.runner.new_sequence(prompt), params) for prompt in prompts]
        try:
            for request in requests:
                request.accept(self.runner.prefill(request.sequence))
            running = requests
            while running := [r for r in running if r.completion.finish_reason is None]:
                for first in range(0, len(running), CHUNK):
                    together = running[first : first + CHUNK]
                    for request, logits in zip(together, self.runner.step([r.sequence for r in together]), strict=True):
                        request.accept(logits)
        finally:
            for request in requests:
                request.sequence.release()
        return [request.completion for request in requests]


def _token_ids(prompt: Many[int]) -> list[int]:
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        raise InputError(f"a prompt is a text or a list of token ids: {error}") from error


def _check_threads(threads: int | None) -> None:
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise InputError(f"threads must be in 1 .. {MAX_THREADS}, not {threads}")


def _free_memory() -> int:
    """Bytes that can be taken without swapping, as far as the system tells."""
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
