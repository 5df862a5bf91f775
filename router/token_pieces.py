"""Tokenizes prompts piece by piece and remembers the pieces: of a conversation, only new turns are tokenized.

A piece begins with a special token, such as the one that ends a turn in a chat template. There a text can be cut: a
tokenizer splits at its added tokens before anything else, and what is between two of them is tokenized by itself
(`tokenizers`, AddedVocabulary). So the ids of the pieces, joined, are the ids of the text.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

MOST_BYTES = 64 << 20
"""Of all pieces that are remembered."""
SHORTEST_PIECE = 64
"""Characters. Each piece that is tokenized costs a call."""
ENTRY_BYTES = 200
"""Of a remembered piece, besides its text and ids."""
BYTES_PER_CHARACTER, BYTES_PER_ID = 4, 4


class TokenPieces:
    """Safe to use from several threads."""

    def __init__(self, tokenizer: Any, ids_of: Callable[[str], list[int]]) -> None:
        """tokenizer: of transformers. ids_of: the ids of a text, without tokens that are added to a prompt."""
        self._ids_of = ids_of
        self._added, self._cutting = _added_tokens(tokenizer)
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def ids(self, text: str) -> list[int]:
        """The ids of a text, equal to those that the tokenizer gives for all of it."""
        if self._added is None:
            return self._ids_of(text)
        ids: list[int] = []
        for piece in self._cut(text, self._added):
            known = self._find(piece)
            if known is None:
                known = array("i", self._ids_of(piece))
                self._remember(piece, known)
            ids += known
        return ids

    def _cut(self, text: str, added: re.Pattern[str]) -> Iterator[str]:
        """Pieces, each but the first of which begins with a token at which a text may be cut. Where they are cut does
        not depend on what follows."""
        begin = 0
        for match in added.finditer(text):
            if match.start() - begin >= SHORTEST_PIECE and match[0] in self._cutting:
                yield text[begin : match.start()]
                begin = match.start()
        yield text[begin:]

    def _find(self, piece: str) -> array[int] | None:
        with self._lock:
            known = self._known.get(piece)
            if known is not None:
                self._known.move_to_end(piece)
            return known

    def _remember(self, piece: str, ids: array[int]) -> None:
        with self._lock:
            if piece in self._known:
                return
            self._known[piece] = ids
            self._num_bytes += _size(piece, ids)
            while self._num_bytes > MOST_BYTES:
                self._num_bytes -= _size(*self._known.popitem(last=False))


def _size(piece: str, ids: array[int]) -> int:
    return ENTRY_BYTES + BYTES_PER_CHARACTER * len(piece) + BYTES_PER_ID * len(ids)


def _added_tokens(tokenizer: Any) -> tuple[re.Pattern[str] | None, frozenset[str]]:
    """What finds added tokens in a text as the tokenizer does, leftmost and longest; and those at which to cut.

    At a token that swallows spaces, or that is found only in normalized text, nothing is cut.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = list(backend.get_added_tokens_decoder().values()) if backend is not None else []
    texts = sorted((token.content for token in added if not token.normalized), key=len, reverse=True)
    cutting = frozenset(
        token.content
        for token in added
        if token.special and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
    )
    if not cutting or not texts:
        return None, frozenset()
    return re.compile("|".join(map(re.escape, filter(None, texts)))), cutting
