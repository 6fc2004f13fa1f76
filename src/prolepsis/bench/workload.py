"""Mixed requests, as a server gets them: prompts that share a beginning with some others, lengths of all sizes."""

import random
from collections.abc import Iterator
from typing import NamedTuple

SYSTEM_PROMPTS = 4


class Asked(NamedTuple):
    """One request: a prompt of token ids, and how many tokens are to follow it."""

    prompt: list[int]
    new_tokens: int


def mixed_requests(vocabulary: int, prompt_tokens: int, new_tokens: int, seed: int) -> Iterator[Asked]:
    """Requests without end, a function of the arguments alone; token ids below `vocabulary`.

    Half of a mean prompt of `prompt_tokens` is one of 4 beginnings. The rest, and the output of `new_tokens` in the
    mean, have any length from 1 to twice their means.
    """
    numbers = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(vocabulary) for _ in range(count)]

    beginnings = [tokens(prompt_tokens // 2) for _ in range(SYSTEM_PROMPTS)]
    longest_rest = 2 * (prompt_tokens - prompt_tokens // 2) - 1
    while True:
        rest = tokens(numbers.randint(1, longest_rest))
        yield Asked(numbers.choice(beginnings) + rest, numbers.randint(1, 2 * new_tokens - 1))


def longest(prompt_tokens: int, new_tokens: int) -> int:
    """The most tokens that a sequence of `mixed_requests` comes to hold."""
    return prompt_tokens // 2 + 2 * (prompt_tokens - prompt_tokens // 2) - 1 + 2 * new_tokens - 1
