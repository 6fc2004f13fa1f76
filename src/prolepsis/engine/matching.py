"""Which tokens may follow: grammars compiled for a model's tokens by `llguidance`, and where an output stands in one.

Compiling is bounded in steps, memory and depth of the stack, and so is each token.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.grammar import Grammar, embedded, fault, parsed_schema
from prolepsis.errors import InputError
from prolepsis.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 8
"""Compiled grammars that are kept for the next request that asks for the same."""

_STACK = 1 << 28  # a chain of 1,000 to 3,000 $refs overflows 8 MiB, and that would end the process
_FORCED = 512
_LIMITS = {"max_lexer_states": 1 << 15, "max_grammar_size": 1 << 17, "initial_lexer_fuel": 1 << 19}


class Matcher:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, eos_ids: frozenset[int], source: str) -> None:
        self._matcher, self._vocab_size, self._eos_ids, self._source = matcher, vocab_size, eos_ids, source
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._ended = False
        self._broken = threading.Event()  # of all copies: they have the states of the lexer in common

    def copy(self, source: str | None = None) -> "Matcher":
        """The same, to go on by itself; errors name `source`, if given."""
        other = Matcher(self._matcher.deep_copy(), self._vocab_size, self._eos_ids, source or self._source)
        other._ended, other._broken = self._ended, self._broken
        return other

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [vocab], with -inf for every token that may not follow; once the output is complete, and can go on in
        no way, only end-of-sequence tokens may. After one of these anything may.

        Raises InputError where the grammar has become too complex.
        """
        if self._ended:
            return logits
        allowed = self.allowed()
        masked = np.full_like(logits, -np.inf)
        np.copyto(masked[: len(allowed)], logits[: len(allowed)], where=allowed)
        return masked

    def allowed(self) -> NDArray[np.bool_]:
        """bool [tokens of the tokenizer]: which ones may follow. Raises InputError as `mask`."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        return np.unpackbits(self._bits[0].view(np.uint8), bitorder="little", count=self._vocab_size).view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on after a token that may follow. Raises InputError as `mask`."""
        if not self._ended:
            self._matcher.consume_token(token)
            self._check()
            self._ended = token in self._eos_ids

    @property
    def is_broken(self) -> bool:
        """Whether it, or a copy, has come upon a limit."""
        return self._broken.is_set()

    def _check(self) -> None:
        if self._matcher.is_error():
            self._broken.set()
            raise fault(self._source, _reason(self._matcher.get_error()))


class GrammarCompiler:
    """Makes matchers for one model. For use by several threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Nothing is built before it is needed."""
        self._tokenizer = tokenizer
        self._ll_tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._keeping = threading.Lock()  # for _kept
        self._compiling = threading.Lock()  # one at a time; for _ll_tokenizer too

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of an output. Compiling takes milliseconds, for the largest grammars some
        seconds; one of the last `KEPT` grammars takes microseconds.

        Raises InputError, which names the grammar's source, for one that cannot be compiled.
        """
        found = self._find(grammar)
        if found is None:
            with self._compiling:
                found = self._find(grammar) or self._compile(grammar)
        return found.copy(grammar.source)

    def has(self, grammar: Grammar) -> bool:
        """Whether `matcher` need not compile it."""
        return self._find(grammar) is not None

    def prepare(self) -> None:
        """Build what every grammar needs, where the library can; where not, who asks for a grammar is told why."""
        with self._compiling, suppress(Exception):
            self._vocabulary("")

    def _vocabulary(self, source: str) -> "LLTokenizer":
        if self._ll_tokenizer is None:
            self._ll_tokenizer = _ll_tokenizer(self._tokenizer, source)
        return self._ll_tokenizer

    def _find(self, grammar: Grammar) -> Matcher | None:
        with self._keeping:
            found = self._kept.pop(grammar, None)
            if found is None or found.is_broken:
                return None
            self._kept[grammar] = found
            return found

    def _compile(self, grammar: Grammar) -> Matcher:
        text = _ll_grammar(grammar)
        made: list[Matcher | BaseException] = []

        def compile_() -> None:
            try:
                made.append(self._new_matcher(text, grammar.source))
            except BaseException as error:  # a panic of the library is no Exception
                made.append(error)

        _run_with_stack(compile_)
        matcher = made[0]
        if isinstance(matcher, InputError):
            raise matcher
        if isinstance(matcher, BaseException):
            raise fault(grammar.source, _reason(str(matcher))) from matcher
        with self._keeping:
            self._kept[grammar] = matcher
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _new_matcher(self, text: str, source: str) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **_LIMITS)
        ll_matcher = LLMatcher(self._vocabulary(source), text, limits=limits, log_level=0)
        matcher = Matcher(ll_matcher, self._tokenizer.vocab_size, self._tokenizer.eos_ids, source)
        if not matcher.allowed().any():
            raise fault(source, "no output can follow the grammar")
        return matcher


def _ll_grammar(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("start: ONE\nONE: " + " | ".join(map(json.dumps, json.loads(grammar.text))))
    schema = {"type": "object"} if grammar.kind == "json_object" else parsed_schema(grammar)
    return LLMatcher.grammar_from_json_schema(embedded(schema, strict=grammar.strict))


def _ll_tokenizer(tokenizer: Tokenizer, source: str) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.eos_ids:
        raise fault(source, "the model has no end-of-sequence token, so no output could end")
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer))
    return LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eos_ids))


class _Vocabulary:
    """A tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = min(tokenizer.eos_ids), tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_tokens.values())

    def __call__(self, text: bytes) -> list[int]:
        """Ids of what has to follow. The first is used, and asked for with every token, so the beginning will do."""
        return self._tokenizer.encode(text[:_FORCED].decode("utf-8", "ignore"), add_bos=False)


def _run_with_stack(function: Callable[[], None]) -> None:
    """Run it in a thread of its own, with room for deep recursion."""
    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=function, name="prolepsis-grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()


def _reason(error: str) -> str:
    """What went wrong, in one line of bounded length."""
    told = " ".join(error.partition("<backtrace>")[0].removeprefix("panic: ").split())
    return f"{told:.200}" or "the grammar cannot be used"
