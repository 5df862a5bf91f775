"""Text to token ids and back. The only place that tokenizes: workers see ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import jinja2

from rpc.errors import InvalidArgument

REPLACEMENT = "\ufffd"


class TokenizerError(Exception):
    """The model's tokenizer can't be loaded."""


class Tokenizer:
    """A model's tokenizer, chat template and end-of-sequence ids."""

    def __init__(self, folder: Path) -> None:
        """Raises TokenizerError."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TokenizerError(f"--model {folder}: its tokenizer can't be loaded: {error}") from error
        self.eos_token_ids = _eos_token_ids(folder)
        file = folder / "tokenizer.json"
        self.file_hash = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with whatever the tokenizer puts around a prompt."""
        ids: list[int] = self._tokenizer(text).input_ids
        return ids

    def encode_chat(self, messages: Seq[tuple[str, str]]) -> list[int]:
        """Ids of a conversation of (role, content), rendered by the model's template.

        Raises InvalidArgument if there is no template or it refuses the conversation.
        """
        if not self._tokenizer.chat_template:
            raise InvalidArgument("chat", "this model has no chat template; send text or token_ids")
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                turns, tokenize=True, add_generation_prompt=True, return_dict=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidArgument("chat", f"the model's chat template refuses it: {error}") from error
        ids: list[int] = rendered["input_ids"]
        return ids

    def decode(self, token_ids: Seq[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end an answer: those of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = json.loads((folder / name).read_text()).get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


class IncrementalDetokenizer:
    """Turns a growing list of ids into pieces of text that join to the text of the whole.

    A piece is held back only while it ends inside a character. Each call decodes the ids since the last boundary
    together with those of the piece before, because a tokenizer may treat the first token of a text in its own way.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context_start = 0
        self._unread_start = 0

    def add(self, token_ids: Seq[int]) -> str:
        """The text that these ids make final."""
        self._ids += token_ids
        return self._read(final=False)

    def finish(self) -> str:
        """The rest, even if it ends inside a character."""
        return self._read(final=True)

    def _read(self, final: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._context_start : self._unread_start])
        text = self._tokenizer.decode(self._ids[self._context_start :])
        if len(text) <= len(known) or (text.endswith(REPLACEMENT) and not final):
            return ""
        self._context_start, self._unread_start = self._unread_start, len(self._ids)
        return text[len(known) :]


class StopStrings:
    """Cuts a stream of text at the first stop string, without ever leaking the beginning of one."""

    def __init__(self, stops: Seq[str], include_stop: bool) -> None:
        self._stops, self._include_stop = tuple(stops), include_stop
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """The text that can be shown now. After a match, `matched` says which stop it was and nothing more comes."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            start, self.matched = min(found, key=lambda match: (match[0], -len(match[1])))
            end = start + len(self.matched) if self._include_stop else start
            shown, self._held = self._held[:end], ""
            return shown
        keep = self._possible_beginning()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string may begin."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
