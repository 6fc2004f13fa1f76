"""The engine as a Python object: load a model, give it prompts, get completions."""

import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import cached_property
from operator import index
from typing import cast

import numpy as np

from prolepsis.coding import RopeSpec
from prolepsis.engine.beam_request import BeamRequest
from prolepsis.engine.beam_search import BeamParams
from prolepsis.engine.completion import Completion, Delta, best
from prolepsis.engine.drafters import check_drafting, new_drafter
from prolepsis.engine.engine import Engine, require_places
from prolepsis.engine.interrupts import deferred
from prolepsis.engine.kernel_cache import mark_used
from prolepsis.engine.matching import GrammarCompiler, Matcher
from prolepsis.engine.memory import RECENT_IN_PASS, new_cache
from prolepsis.engine.request import Request
from prolepsis.engine.rng import fresh_seed
from prolepsis.engine.runner import CHUNK, Progress, Runner
from prolepsis.engine.sampling_params import SamplingParams, is_int
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.speculation import Speculation
from prolepsis.engine.swap import SwapSpace
from prolepsis.engine.task import Task
from prolepsis.errors import ContextLengthError, InputError
from prolepsis.kernels import compiled_before
from prolepsis.kernels.team import MAX_THREADS
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.eviction import Eviction
from prolepsis.kv.prefix_index import PrefixIndex
from prolepsis.model.chat_template import ChatTemplate, Message, Tools, encode_chat
from prolepsis.model.decoder import PRECISIONS, Decoder
from prolepsis.model.model_file import open_model
from prolepsis.model.pull import DEFAULT_MODEL, resolve
from prolepsis.model.tokenizer import Tokenizer

BLOCK_SIZES = (16, 32)
PREEMPTIONS = ("swap", "recompute")
_LONGEST = 1 << 17  # tokens of context unless more are asked for: the tables of positions grow with it

Prompt = str | Many[int]
Params = SamplingParams | BeamParams


class LLM:
    """A loaded model with its paged cache and the engine that runs requests in it.

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
        kv_evict: str | None = None,
        block_size: int = 32,
        precision: str = "high",
        threads: int | None = None,
        max_running: int = 64,
        draft: str | None = None,
        draft_tokens: int | None = None,
        prefix_caching: bool = True,
        preemption: str = "swap",
        swap_memory: int | None = None,
        swap_disk: int | None = None,
        on_download: Callable[[int, int], None] | None = None,
    ) -> None:
        """
        model: a GGUF file, a registered name, or a Hugging Face repository (`prolepsis.model.pull`).
        max_context: longest sequence in tokens; by default what the model was trained for, up to 131,072.
        kv_memory: bytes for the KV cache; by default a quarter of free memory, or what `max_running` longest sequences
        take if that is less. The system supplies them as they are first used.
        kv_dtype: "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4" or "kivi4" (docs/quantization.md).
        kv_evict: None or "none" keeps every token; "h2o:512" or "h2o:20%" drops, of a sequence that holds so many, or
        such a share of max_context, the tokens that least attention was paid to (`prolepsis.kv.eviction`). Lossy, and
        without drafts, prefix caching, swapping and sessions.
        block_size: tokens in a block of the cache, 16 or 32; those of kivi4 have 128 whatever is asked for.
        precision: "high" keeps 16 bits of each activation; "fast" keeps 8, as most engines do.
        threads: by default one for each core.
        max_running: most sequences that run at once.
        draft: who guesses the tokens that come next, so that one pass may settle several: None or "none", "ngram",
        "twin", or "model:" and a model as above (`prolepsis.speculate`). What comes out has the same distribution; at
        temperature 0, or with a seed, it is the same.
        draft_tokens: how many tokens are guessed at a time; by default as many as pay.
        prefix_caching: whether prompts share what the cache holds of others that began alike.
        preemption: what is done with a sequence that has to leave a full cache: "swap" keeps its K and V losslessly
        coded, "recompute" computes them again. The outcome is the same.
        swap_memory, swap_disk: bytes of coded K and V in memory and then in temporary files; by default as many as half
        of the cache, and as the cache, has. What finds no room there is computed again.

        Raises InputError for a model or setting that cannot be used.
        """
        _check_threads(threads)
        check_drafting(draft, draft_tokens)
        evicts = kv_evict not in (None, "none")
        if evicts and draft not in (None, "none"):
            raise InputError(
                "kv_evict and draft exclude each other: the attention of drafts that are refused cannot be taken back"
            )
        if evicts and kv_dtype == "kivi4":
            raise InputError("kv_evict and kv_dtype kivi4 exclude each other: its codes lie in blocks of 128 tokens")
        _check_choice("block_size", block_size, BLOCK_SIZES)
        _check_choice("precision", precision, tuple(PRECISIONS))
        _check_choice("preemption", preemption, PREEMPTIONS)
        _check_bytes("kv_memory", kv_memory)
        _check_bytes("swap_memory", swap_memory)
        _check_bytes("swap_disk", swap_disk)
        require_places(max_running, CHUNK, block_size)
        self.path = resolve(os.fspath(model), progress=on_download)
        self.name = os.fspath(model)
        self._file = open_model(self.path)
        self.config = self._file.config
        self._check_context(max_context)
        longest = max_context or min(self.config.max_context, _LONGEST)
        eviction = Eviction.named(kv_evict or "", longest) if evicts else None
        most_held = longest if eviction is None else min(longest, eviction.budget)
        self._cache = new_cache(
            self.config,
            dtype=kv_dtype,
            block_size=block_size,
            budget=kv_memory,
            max_context=None if max_context is None else most_held,
            longest=most_held,
            sequences=max_running,
        )
        held = self._cache.pool.num_blocks * self._cache.block_size
        self.max_context = longest if held >= most_held else held
        decoder = Decoder.load(self._file, self.config, self.max_context, CHUNK, threads, precision, evicts)
        self.runner = Runner(decoder, self._cache, eviction)
        cache_bytes = held * self._cache.bytes_per_token
        swap = None
        if preemption == "swap" and not evicts:
            swap = SwapSpace(
                self._cache,
                self.rope,
                cache_bytes // 2 if swap_memory is None else swap_memory,
                cache_bytes if swap_disk is None else swap_disk,
            )
        prefix = PrefixIndex(self._cache.pool, self._cache.block_size) if prefix_caching and not evicts else None
        drafter = new_drafter(draft, self._file, decoder, self._cache)
        self._speculation = None if drafter is None else Speculation(drafter, draft_tokens)
        if kv_dtype == "kivi4":
            max_running = min(max_running, self._cache.num_recent - RECENT_IN_PASS)
        self.engine = Engine(self.runner, prefix, swap, max_running, speculation=self._speculation)
        """Runs requests together; `generate` is made of it."""
        mark_used()

    def _check_context(self, max_context: int | None) -> None:
        if max_context is not None and not (is_int(max_context) and 2 <= max_context <= self.config.max_context):
            raise InputError(
                f"max_context must be in 2 .. {self.config.max_context}, what {self.name} was trained for, "
                f"not {max_context!r}"
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelFileError where the file has none that is supported."""
        return self._file.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises ModelFileError where the file has none."""
        return self._file.chat_template

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model file, weights and metadata alike."""
        return self._file.fingerprint()

    @property
    def model_bytes(self) -> int:
        """Size of the model's files."""
        return self._file.size

    @cached_property
    def rope(self) -> RopeSpec:
        """RoPE as the cache holds it: the engine always turns pairs of halves (`model.weights`)."""
        rope = self.config.rope
        return RopeSpec(rope.theta, rope.dim, "half", rope.scaling_factor, rope.frequency_factors)

    @property
    def kv_cache(self) -> PagedKVCache:
        """The cache all sequences share."""
        return self._cache

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises InputError for one that is empty or too long, or ids beyond the vocabulary."""
        if isinstance(prompt, str):
            self.tokenizer.require_at_most(self.max_context, prompt)
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = _token_ids(prompt)
        self.check_prompt(tokens)
        return tokens

    def check_prompt(self, tokens: Many[int]) -> None:
        """Raises InputError unless `tokens` can be continued by at least one token."""
        if not tokens:
            raise InputError("the prompt is empty")
        if len(tokens) >= self.max_context:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens, but the context holds {self.max_context} "
                "and the answer needs room too; shorten the prompt, or raise max_context or kv_memory where the model "
                f"allows it (it was trained for {self.config.max_context})"
            )
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            beyond = next(t for t in tokens if not 0 <= t < self.config.vocab_size)
            raise InputError(f"token id {beyond} is outside the vocabulary of {self.config.vocab_size}")

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: Params | Many[Params] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        progress: Progress | bool = False,
    ) -> list[Completion]:
        """Complete one prompt or several (texts, or lists of token ids), as many together as the cache has room for.

        params: for all prompts, or one for each; `BeamParams` search instead of sampling. progress: called with
        (prompts done, prompts) as they end; True draws a bar on standard error. Returns `params.n` completions for each
        prompt, in order. A request that fails on its way leaves the others alone: its completion has `error` set.
        Raises InputError, before anything is run, for a prompt or parameters that cannot be used.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
        encoded = [self.encode(prompt) for prompt in cast(Many[Prompt], [prompts] if single else prompts)]
        wanted = _one_for_each(params, len(encoded))
        groups = [
            self._new_tasks(tokens, each, priority, cache_salt) for tokens, each in zip(encoded, wanted, strict=True)
        ]
        if progress is True:
            from prolepsis.engine.progress import bar  # what it draws with is slow to import, and not needed else

            with bar("generating") as on_progress:
                self._run_all(groups, on_progress)
        else:
            self._run_all(groups, progress or _ignore)
        return [
            completion
            for group, each in zip(groups, wanted, strict=True)
            for completion in best(_completions(group), each.n)
        ]

    def _run_all(self, groups: Many[Many[Task]], on_progress: Progress) -> None:
        left = {request: index for index, group in enumerate(groups) for request in group}
        open_ = [len(group) for group in groups]
        requests = [request for group in groups for request in group]
        for request in requests:
            self.engine.require_fits(request)
        with deferred() as check_interrupts:
            try:
                for request in requests:
                    self.engine.add(request)
                while left:
                    check_interrupts()
                    for task, delta in self.engine.step():
                        if (delta is None or delta.finish_reason is not None) and task in left:
                            index = left.pop(task)
                            open_[index] -= 1
                            if open_[index] == 0:
                                on_progress(open_.count(0), len(groups))
            finally:
                for request in requests:
                    self.engine.cancel(request)

    def encode_chat(self, messages: Many[Message], tools: Tools | None = None) -> list[int]:
        """Token ids of a conversation that the assistant is to continue, and may call `tools` in. Raises InputError as
        `encode` does."""
        tokens = encode_chat(self.tokenizer, self.chat_template, messages, tools=tools, max_tokens=self.max_context)
        self.check_prompt(tokens)
        return tokens

    def run(self, request: Request, progress: Progress | None = None) -> Iterator[Delta]:
        """Run one request token by token. Closing the iterator stops it; its sequence keeps what it has."""
        request.statistics.started = time.perf_counter()
        deltas = [request.accept(self.runner.prefill(request.sequence, progress))]
        try:
            while True:
                request.statistics.told(len(deltas))
                yield from deltas
                if request.finished:
                    return
                deltas = self._step(request)
        finally:
            # An interruption may come between a pass with drafts and its verdict on them.
            table = request.sequence.table
            table.truncate(min(table.length, len(request.sequence.tokens)))

    def _step(self, request: Request) -> list[Delta]:
        if self._speculation is not None:
            return self._speculation.step(self.runner, request)
        return request.advance(self.runner.run([(request.sequence, 1, "last")]))

    def new_request(
        self, prompt: Sequence | Many[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Request:
        """A request that continues token ids, or a sequence that is held elsewhere.

        Raises InputError if that leaves no room for an answer.
        """
        sequence = prompt if isinstance(prompt, Sequence) else self.runner.new_sequence(prompt)
        self.check_prompt(sequence.tokens)
        rest = (self._tokenizer_if_any(), self.config.vocab_size, self.max_context, priority, cache_salt)
        return Request(sequence, params, *rest, self._new_matcher(params))

    def new_requests(
        self, prompt: Many[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> list[Request]:
        """`params.samples` requests for one prompt, which is read once. Raises InputError as `new_request` does."""
        base = params if params.seed is not None or params.samples == 1 else replace(params, seed=fresh_seed())
        if base.logit_bias:
            _ = base.bias  # made once, for all
        requests = [
            self.new_request(prompt, base.of_sample(i), priority=priority, cache_salt=cache_salt)
            for i in range(params.samples)
        ]
        for follower in requests[1:]:
            follower.leader = requests[0]
        return requests

    def new_search(
        self, prompt: Many[int], params: BeamParams, *, priority: int = 0, cache_salt: str = ""
    ) -> BeamRequest:
        """A request that searches. Raises InputError as `new_request` does."""
        self.check_prompt(prompt)
        rest = (self._tokenizer_if_any(), self.config.vocab_size, self.max_context, priority, cache_salt)
        return BeamRequest(self.runner.new_sequence(prompt), params, *rest)

    def _new_tasks(self, prompt: Many[int], params: Params, priority: int, cache_salt: str) -> Many[Task]:
        if isinstance(params, BeamParams):
            return [self.new_search(prompt, params, priority=priority, cache_salt=cache_salt)]
        return self.new_requests(prompt, params, priority=priority, cache_salt=cache_salt)

    def _tokenizer_if_any(self) -> Tokenizer | None:
        return self.tokenizer if self._file.has_tokenizer else None

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars; what is compiled here beforehand, by any thread, makes no request wait. Raises
        ModelFileError as `tokenizer`."""
        return GrammarCompiler(self.tokenizer)

    def prepare_grammars(self) -> None:
        """Have the vocabulary ready for grammars, which takes some tenths of a second, where the model has one."""
        if self._file.has_tokenizer:
            self.grammars.prepare()

    def _new_matcher(self, params: SamplingParams) -> Matcher | None:
        return None if params.grammar is None else self.grammars.matcher(params.grammar)

    @property
    def needs_compiling(self) -> bool:
        """Whether the first pass will have to compile the kernels for this CPU (once per machine and version)."""
        return not compiled_before()


def _ignore(done: int, total: int) -> None:
    pass


def _one_for_each(params: Params | Many[Params] | None, prompts: int) -> Many[Params]:
    if params is None or isinstance(params, Params):
        return [params or SamplingParams()] * prompts
    if isinstance(params, str | dict) or not all(isinstance(each, Params) for each in params):
        raise InputError(f"params must be SamplingParams or BeamParams, or a list of them, not {params!r}")
    if len(params) != prompts:
        raise InputError(f"params has {len(params)} entries for {prompts} prompts; give one for all, or one for each")
    return params


def _completions(group: Many[Task]) -> list[Completion]:
    return [completion for task in group for completion in task.completions]


def _check_bytes(name: str, value: object) -> None:
    if value is not None and not (is_int(value) and value >= 0):
        raise InputError(f"{name} must be a whole number of bytes, or None, not {value!r}")


def _check_choice(name: str, value: object, choices: Many[object]) -> None:
    if type(value) is not type(choices[0]) or value not in choices:
        raise InputError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def _token_ids(prompt: Many[int]) -> list[int]:
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        raise InputError(f"a prompt is a text or a list of token ids: {error}") from error


def _check_threads(threads: int | None) -> None:
    if threads is not None and not (is_int(threads) and 1 <= threads <= MAX_THREADS):
        raise InputError(f"threads must be in 1 .. {MAX_THREADS}, not {threads!r}")
