"""SentencePiece's BPE (Kudo and Richardson 2018), as GGUF files with `tokenizer.ggml.model = llama` describe it.

Such a file has no merges: two neighbouring pieces may merge whenever their joined text is a piece, the highest
score first, the leftmost where scores are equal. The `tokenizers` library ranks pairs instead and so differs on
equal scores, hence this loop. Characters without a piece become one token for each of their bytes.

Where no piece continues past the end of a word (true of Llama's and Mistral's vocabularies), nothing merges across
words, so text is cut at them and the ids of a word are remembered.
"""

from __future__ import annotations

import re
from functools import lru_cache
from heapq import heapify, heappop, heappush

SPACE = "▁"
REMEMBERED_WORDS = 50_000
REMEMBERED_LENGTH = 64

_WORD = re.compile(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+")
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class SentencePieceBPE:
    """Ids of text without special tokens.

    A byte without a token of its own becomes `unknown_id`, or is dropped where that is None.
    """

    def __init__(
        self,
        pieces: dict[str, int],
        scores: list[float],
        byte_ids: dict[str, int],
        unknown_id: int | None,
        add_space_prefix: bool,
    ) -> None:
        """`pieces`: text -> id of all that may come out of a merge; `byte_ids`: "<0x00>" and so on -> id.

        `scores` are by id.
        """
        self.add_space_prefix = add_space_prefix
        self._pieces = pieces
        self._scores = scores
        self._byte_ids = {int(match[1], 16): i for name, i in byte_ids.items() if (match := _BYTE.fullmatch(name))}
        self._unknown_id = unknown_id
        self._words_are_apart = not any(re.search(f"[^{SPACE}]{SPACE}", piece) for piece in pieces)
        self._ids_of_word = lru_cache(REMEMBERED_WORDS)(self._merged)

    def encode(self, text: str) -> list[int]:
        marked = (" " + text if self.add_space_prefix else text).replace(" ", SPACE)
        if not self._words_are_apart:
            return list(self._merged(marked))
        ids: list[int] = []
        for word in _WORD.findall(marked):
            ids += self._ids_of_word(word) if len(word) <= REMEMBERED_LENGTH else self._merged(word)
        return ids

    def spelled_bytes(self, token: str) -> bytes:
        """The bytes a token's text stands for."""
        match = _BYTE.fullmatch(token)
        if match and int(match[1], 16) in self._byte_ids:
            return bytes([int(match[1], 16)])
        return token.replace(SPACE, " ").encode("utf-8")

    def _merged(self, text: str) -> tuple[int, ...]:
        """Ids of `text`: symbol i begins at character i, `end[i]` is where it ends; a merged one has an end of 0."""
        pieces, scores = self._pieces, self._scores
        end = list(range(1, len(text) + 1))
        before = list(range(-1, len(text) - 1))
        # (-score, left symbol, right symbol, end of both): pops the highest score, then the leftmost.
        queue: list[tuple[float, int, int, int]] = []
        for left in range(len(text) - 1):
            piece = pieces.get(text[left : left + 2])
            if piece is not None:
                queue.append((-scores[piece], left, left + 1, left + 2))
        heapify(queue)
        while queue:
            _, left, right, stop = heappop(queue)
            if end[left] != right or end[right] != stop:
                continue
            end[left], end[right] = stop, 0
            if stop < len(text):
                before[stop] = left
                piece = pieces.get(text[left : end[stop]])
                if piece is not None:
                    heappush(queue, (-scores[piece], left, stop, end[stop]))
            previous = before[left]
            if previous >= 0:
                piece = pieces.get(text[previous:stop])
                if piece is not None:
                    heappush(queue, (-scores[piece], previous, left, stop))
        return self._ids(text, end)

    def _ids(self, text: str, end: list[int]) -> tuple[int, ...]:
        ids: list[int] = []
        begin = 0
        while begin < len(text):
            symbol = text[begin : end[begin]]
            piece = self._pieces.get(symbol)
            if piece is not None:
                ids.append(piece)
            else:
                spelled = (self._byte_ids.get(byte, self._unknown_id) for byte in symbol.encode("utf-8"))
                ids.extend(i for i in spelled if i is not None)
            begin = end[begin]
        return tuple(ids)
