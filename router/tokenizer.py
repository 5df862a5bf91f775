"""Converts text to token ids and back. Only the router tokenizes: workers get token ids."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.token_pieces import TokenPieces
from rpc.errors import LONGEST_QUOTE, InvalidArgument

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
CHARACTERS_PER_TOKEN = 8
"""Twice the average of texts. If a text has more characters per allowed token, a prefix is tokenized first."""
SLACK_TOKENS = 16
"""Tokens that a prefix may have in excess of the same characters in the whole text, because of the cut."""


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation."""

    role: str
    content: str
    name: str = ""

    def for_template(self, knows_developers: bool) -> dict[str, str]:
        """The turn for a chat template. knows_developers: whether the template has that role; else use system."""
        role = "system" if self.role == "developer" and not knows_developers else self.role
        return {"role": role, "content": self.content, **({"name": self.name} if self.name else {})}


def too_long(num_tokens: int, longest_sequence: int, pool_words: str = "", at_least: bool = False) -> InvalidArgument:
    """The error for a prompt that leaves no room for an output token."""
    return InvalidArgument(
        "prompt",
        f"has {'at least ' if at_least else ''}{num_tokens} tokens; with at least 1 output token, at most "
        f"{longest_sequence - 1} fit: this model's maximum context length is {longest_sequence} tokens{pool_words}",
        reason=CONTEXT_LENGTH_EXCEEDED,
    )


class TokenizerError(Exception):
    """The model's tokenizer can't be loaded."""


class Tokenizer:
    """A model's tokenizer, chat template and end-of-sequence ids."""

    def __init__(self, folder: Path) -> None:
        """Loads the tokenizer of a model folder. Raises TokenizerError."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except Exception as error:
            # Libraries raise any type for a broken file, or for a file that needs another library.
            raise TokenizerError(f"--model {folder}: its tokenizer can't be loaded: {error}") from error
        file = folder / "tokenizer.json"
        self.file_hash = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        self._token_bytes = TokenBytes(self._tokenizer)
        self._pieces = TokenPieces(self._tokenizer, self._plain_ids)
        self.eos_token_ids = _eos_token_ids(folder, self._tokenizer, self._token_bytes.special_ids)
        self.longest_token = max((len(text) for text in self._tokenizer.get_vocab()), default=1)
        """Characters of the longest token in the vocabulary: an upper bound of a token's text."""
        texts = {token: self._tokenizer.convert_ids_to_tokens(token) for token in self._token_bytes.special_ids}
        self.special_tokens: dict[int, str] = {token: text for token, text in texts.items() if text}
        """Texts of special tokens, which outputs hide by default, by id."""

    def encode(self, text: str, max_tokens: int | None = None, longest_sequence: int = 0) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer adds to a prompt.

        Text that already begins with the tokenizer's beginning-of-sequence token gets no second one.
        max_tokens, longest_sequence: limits of a prompt and of a sequence, in tokens; None: no limit.
        Raises InvalidArgument if the prompt is longer, possibly before all of the text is tokenized.
        """
        self._check_length(text, max_tokens, longest_sequence)
        if not self._tokenizer.num_special_tokens_to_add():
            return self._pieces.ids(text)
        ids: list[int] = self._tokenizer(text).input_ids
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_chat(self, messages: Seq[Turn], max_tokens: int | None = None, longest_sequence: int = 0) -> list[int]:
        """Ids of a conversation, rendered by the model's template.

        max_tokens, longest_sequence: see `encode`.
        Raises InvalidArgument if there is no template, if the template fails, or if the prompt is too long.
        """
        template = self._tokenizer.chat_template
        if not template:
            raise InvalidArgument("chat", "this model has no chat template; send text or token_ids")
        knows_developers = "developer" in str(template)
        turns = [turn.for_template(knows_developers) for turn in messages]
        try:
            rendered: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            # A template is code from the model's authors and may raise any type. The cause is this conversation.
            message = f"the model's chat template rejects this conversation: {str(error)[:LONGEST_QUOTE]}"
            raise InvalidArgument("chat", message) from error
        self._check_length(rendered, max_tokens, longest_sequence)
        return self._pieces.ids(rendered)

    def _plain_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _check_length(self, text: str, max_tokens: int | None, longest_sequence: int) -> None:
        """Raises InvalidArgument if a text certainly has too many tokens. Tokenizing takes some hundred bytes of memory
        per byte of text, so only a prefix of a text that is far too long is tokenized."""
        if max_tokens is None:
            return
        if len(text) > (max_tokens + 1) * self.longest_token:
            raise too_long(len(text) // self.longest_token, longest_sequence, at_least=True)
        part = (max_tokens + SLACK_TOKENS) * CHARACTERS_PER_TOKEN
        if len(text) > 2 * part:
            num_tokens = len(self._plain_ids(text[:part])) - SLACK_TOKENS
            if num_tokens > max_tokens:
                raise too_long(num_tokens, longest_sequence, at_least=True)

    def decode(self, token_ids: Seq[int], include_special_tokens: bool = False) -> str:
        """Text of ids."""
        detokenizer = self.detokenizer(include_special_tokens)
        return detokenizer.add(token_ids) + detokenizer.finish()

    def detokenizer(self, include_special_tokens: bool = False) -> Detokenizer:
        """A detokenizer for one output."""
        table = self._token_bytes
        if table.is_exact:
            return ByteDetokenizer(table.all if include_special_tokens else table.visible, table.strips_first_space)

        def decode(token_ids: Seq[int]) -> str:
            # No clean-up: "it ' s" would become "it's" only after "it '" was sent.
            text: str = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=not include_special_tokens, clean_up_tokenization_spaces=False
            )
            return text

        return WindowDetokenizer(decode, lambda token: include_special_tokens or token not in table.special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a single token; empty for unknown ids."""
        return self._token_bytes.all(token_id)


class TokenBytes:
    """The bytes of each token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        added = backend.get_added_tokens_decoder() if backend is not None else {}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
        parts = _decoder_parts(decoder)
        self._is_byte_level = [part["type"] for part in parts] == ["ByteLevel"]
        self.strips_first_space = parts == [*_FALLBACK_PARTS, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        self.is_exact = self._is_byte_level or self.strips_first_space or parts == _FALLBACK_PARTS
        """Whether the joined bytes of tokens are the text in UTF-8, so that text can be made byte by byte."""
        self._known: dict[int, bytes] = {}

    def all(self, token_id: int) -> bytes:
        """Bytes of any token."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def visible(self, token_id: int) -> bytes:
        """Bytes of a token; empty for special tokens."""
        return b"" if token_id in self.special_ids else self.all(token_id)

    def _look_up(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF[letter] for letter in token)
            except KeyError:
                return token.encode()
        if (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token)) is not None:
            return bytes.fromhex(byte[1])
        return token.replace("\u2581", " ").encode()


_FALLBACK_PARTS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


def _decoder_parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a tokenizer's decoder in tokenizer.json."""
    if decoder is None:
        return []
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return parts


def _byte_alphabet() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte (Radford et al. 2019): printable bytes stand for themselves,
    the others for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _eos_token_ids(folder: Path, tokenizer: Any, special_ids: frozenset[int]) -> tuple[int, ...]:
    """Ids that end an output: all ids in generation_config.json, config.json and the tokenizer, and the token that the
    chat template writes after an assistant's turn. Published models often have only one id in each of these."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            config = json.loads((folder / name).read_text())
            for section in (config, config.get("text_config")):
                ids = section.get("eos_token_id") if isinstance(section, dict) else None
                found.update(ids if isinstance(ids, list) else [ids] if ids is not None else [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    end_of_turn = _end_of_turn(tokenizer)
    if end_of_turn in special_ids:
        found.add(end_of_turn)
    return tuple(sorted(found))


def _end_of_turn(tokenizer: Any) -> int | None:
    """The token that the chat template writes directly after an assistant's text; None: there is no template, or no
    such token."""
    text = "kvferry"
    if not tokenizer.chat_template:
        return None
    try:
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
        rendered: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
    except Exception:  # a template may reject this conversation and raise any type
        return None
    after = rendered.rpartition(text)[2]
    ids: list[int] = tokenizer(after, add_special_tokens=False).input_ids if after else []
    return ids[0] if ids else None
