"""Drafts without a model: what followed the last time these tokens were seen.

Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference", arXiv:2304.04487) on
an index as LZ77 coders have it: from each short n-gram to its latest place, and from each place to the one before.
"""

from collections.abc import Sequence
from itertools import islice

from prolepsis.speculate.drafter import Draft, Draftee

SHORTEST = 2
"""Tokens that must be equal for a match. After one, a quarter of the drafts was right; after two, more than half."""

LONGEST = 32
"""Tokens of a match that are looked at, and so the most of a draft."""

CANDIDATES = 16
"""Places compared for a draft, the latest first."""

COMPARED = 16
"""Tokens compared to tell whether a sequence still is what was indexed."""

NOWHERE = -1


class NgramDrafter:
    """Continues a sequence as its prompt or output went on after the longest match of its last tokens."""

    name = "ngram"

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(self, batch: Sequence[Draftee]) -> list[Draft]:
        """A draft for each sequence, as long as the match it follows from but for `limit`; none where nothing matches.

        The longer the match, the likelier what followed it: where a text is repeated, drafts double with every round,
        and a match by chance costs little.
        """
        return [self._draft(draftee) for draftee in batch]

    def forget(self, key: int) -> None:
        """Drop the index of a sequence, if there is one."""
        self._indices.pop(key, None)

    def _draft(self, draftee: Draftee) -> Draft:
        index = self._indices.setdefault(draftee.key, _Index())
        index.follow(draftee.tokens)
        tokens = index.continuation(draftee.limit)
        return Draft(tokens, [None] * len(tokens))


class _Index:
    """The tokens of one sequence and where each n-gram of them was before. Linear in the tokens; a token is added, or
    taken away again, in constant time."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        """The last place of each n-gram of `SHORTEST` tokens: that of its last token."""
        self._before: list[int] = []
        """For each place, the place before it of the n-gram that ends there."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Become the index of `tokens`. Only the last of the tokens in common are compared: a difference far back
        makes drafts worse, and nothing wrong."""
        shared = min(len(self._tokens), len(tokens))
        start = max(0, shared - COMPARED)
        if self._tokens[start:shared] != list(tokens[start:shared]):
            shared = next(i for i in range(shared) if self._tokens[i] != tokens[i])
        self._shorten(shared)
        self._extend(tokens[shared:])

    def continuation(self, limit: int) -> list[int]:
        """What followed the longest match, at most as long as that and `limit`. Where the match is nearer to the end,
        it runs on into the draft itself, as for a text with a period."""
        match, length = self._longest_match()
        wanted = min(length, limit)
        draft = self._tokens[match + 1 : match + 1 + wanted]
        period = len(draft)
        while len(draft) < wanted:
            draft.append(draft[-period])
        return draft

    def _longest_match(self) -> tuple[int, int]:
        """Where the longest earlier match of the last tokens ends, the latest of several, and its length; or
        (NOWHERE, 0)."""
        best, longest = NOWHERE, 0
        place = self._before[-1] if self._before else NOWHERE
        for _ in range(CANDIDATES):
            if place == NOWHERE or longest == LONGEST:
                break
            length = self._match_length(place)
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best, longest

    def _match_length(self, place: int) -> int:
        """How many tokens up to `place`, where the last `SHORTEST` are known to match, equal those up to the end."""
        tokens, back = self._tokens, len(self._tokens) - 1 - place
        first = max(0, place + 1 - LONGEST)
        at = place - SHORTEST
        while at >= first and tokens[at] == tokens[at + back]:
            at -= 1
        return place - at

    def _extend(self, new: Sequence[int]) -> None:
        tokens, latest, before = self._tokens, self._latest, self._before
        first = max(0, len(tokens) - SHORTEST + 1)
        tokens.extend(new)
        before.extend([NOWHERE] * (min(len(tokens), SHORTEST - 1) - len(before)))
        tail = tokens[first:]
        grams = zip(*(islice(tail, i, None) for i in range(SHORTEST)), strict=False)
        for place, gram in enumerate(grams, first + SHORTEST - 1):
            before.append(latest.get(gram, NOWHERE))
            latest[gram] = place

    def _shorten(self, length: int) -> None:
        tokens, latest, before = self._tokens, self._latest, self._before
        while len(tokens) > length:
            earlier = before.pop()
            gram = tuple(tokens[-SHORTEST:])
            tokens.pop()
            if earlier != NOWHERE:
                latest[gram] = earlier
            else:
                latest.pop(gram, None)
