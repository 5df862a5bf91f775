"""Incremental detokenization: token ids to pieces of text. The joined pieces are the text of all tokens.

A piece never ends inside a character. Only the bytes of an incomplete character are held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

REPLACEMENT = "\ufffd"
LONGEST_UNFINISHED = 3
"""Most bytes of an incomplete UTF-8 character, and so most of its tokens."""


class Detokenizer(Protocol):
    """Turns a growing list of token ids into text."""

    def add(self, token_ids: Seq[int]) -> str:
        """The text that these tokens make final."""
        ...

    def finish(self) -> str:
        """The remaining text, even if it ends inside a character."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: byte-level BPE, and SentencePiece with byte fallback.

    The text equals that of the tokenizer's own decoder, with one exception. If a run of byte fallback tokens is not
    valid UTF-8, that decoder replaces the whole run, even characters that a stream has sent already.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], strip_first_space: bool) -> None:
        """bytes_of: the bytes of a token's text.

        strip_first_space: whether the tokenizer adds a space before a text, which has to be removed.
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
    """For any tokenizer: decodes a window of the last tokens together with the new tokens.

    The window begins one piece before the new tokens, because a tokenizer may treat the first token of a text
    differently.
    """

    def __init__(self, decode: Callable[[Seq[int]], str], is_text: Callable[[int], bool]) -> None:
        """decode: text of ids. is_text: whether an id has visible text."""
        self._decode, self._is_text = decode, is_text
        self._ids: list[int] = []
        self._piece_start = 0
        """Index in the window of the last piece's first token; earlier tokens are context."""
        self._num_shown = 0
        """Characters of the window's text that were returned already."""

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
        # A character has at most 4 bytes, so text before the last 3 tokens can't change any more.
        settled = self._decode(self._ids[:-LONGEST_UNFINISHED])
        unsettled = len(text) - (len(settled) if text.startswith(settled) else self._num_shown)
        return min(len(text) - len(text.rstrip(REPLACEMENT)), unsettled)
