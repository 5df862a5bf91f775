"""Token ids to text, piece by piece. Pieces join to the text of the whole, and none ends inside a character.

Nothing is held back but an unfinished character: a few bytes that later ones may complete.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

REPLACEMENT = "\ufffd"
LONGEST_UNFINISHED = 3
"""Bytes that an unfinished UTF-8 character can have, so tokens too."""


class Detokenizer(Protocol):
    """Turns a growing list of token ids into text."""

    def add(self, token_ids: Seq[int]) -> str:
        """The text that these tokens make final."""
        ...

    def finish(self) -> str:
        """The rest, even if it ends inside a character."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: byte-level BPE, and SentencePiece with byte fallback.

    The text is that of the tokenizer's own decoder. Only where bytes make no characters does byte fallback differ: that
    decoder gives up a whole run of bytes then, even the characters that a stream has shown already.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], strip_first_space: bool) -> None:
        """bytes_of: the bytes of a token that count as text.

        strip_first_space: the first space of a text is the tokenizer's, not the text's.
        """
        self._bytes_of, self._strip_first_space = bytes_of, strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Seq[int]) -> str:
        """See `Detokenizer.add`."""
        return self._strip(self._decoder.decode(b"".join(map(self._bytes_of, token_ids))))

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_first_space and text:
            self._strip_first_space = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For any tokenizer: decodes the last tokens again together with the new ones.

    The window begins one piece before the new tokens, because a tokenizer may treat the first token of a text in its
    own way.
    """

    def __init__(self, decode: Callable[[Seq[int]], str], is_text: Callable[[int], bool]) -> None:
        """decode: text of ids; is_text: whether an id is shown at all."""
        self._decode, self._is_text = decode, is_text
        self._ids: list[int] = []
        self._piece_start = 0
        """Where the last piece began; the window's tokens before it are context."""
        self._num_shown = 0
        """Characters of the window's text that were given out."""

    def add(self, token_ids: Seq[int]) -> str:
        """See `Detokenizer.add`."""
        self._ids += filter(self._is_text, token_ids)
        text = self._decode(self._ids)
        end = len(text) - self._num_unfinished(text)
        piece = text[self._num_shown : end]
        if end < len(text):
            self._num_shown = max(self._num_shown, end)
        elif piece:
            # The next window begins with this piece.
            self._ids = self._ids[self._piece_start :]
            self._piece_start = len(self._ids)
            self._num_shown = len(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._decode(self._ids)[self._num_shown :]

    def _num_unfinished(self, text: str) -> int:
        """Characters at the end of the text that later tokens may change."""
        if not text.endswith(REPLACEMENT):
            return 0
        # A character has at most 4 bytes: what 3 tokens could not complete stays as it is.
        settled = self._decode(self._ids[:-LONGEST_UNFINISHED])
        unsettled = len(text) - (len(settled) if text.startswith(settled) else self._num_shown)
        return min(len(text) - len(text.rstrip(REPLACEMENT)), unsettled)
