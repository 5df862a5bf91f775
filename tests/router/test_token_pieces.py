"""Prompts are tokenized piece by piece, with the ids of the whole, and no piece twice."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from router import token_pieces
from router.token_pieces import TokenPieces
from router.tokenizer import Tokenizer, Turn

WORDS = [
    "hello",
    " world",
    "\n",
    "  ",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "<s>",
    "</s>",
    "🙂",
    "ǅ",
    "ab" * 40,
    "<x>",
]


def made_tokenizer(special, normalizer=None, pre_tokenizer=None):
    """A tokenizer of single letters, pairs of letters and bytes of others."""
    letters = [chr(n) for n in range(32, 127)] + ["\n", "\u2581"]
    vocab = {letter: n for n, letter in enumerate(letters)}
    merges = [("a", "b"), ("\u2581", "w"), ("l", "l"), ("\u2581", "\u2581"), (" ", " ")]
    vocab |= {left + right: len(vocab) + n for n, (left, right) in enumerate(merges)}
    vocab["<unk>"] = len(vocab)
    backend = Backend(BPE(vocab, merges, unk_token="<unk>"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


PLAIN = [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>", "<s>", "</s>")]
MADE = {
    "metaspace at the first piece": lambda: made_tokenizer(
        PLAIN, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")
    ),
    "metaspace at every piece": lambda: made_tokenizer(
        PLAIN, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")
    ),
    "prepended": lambda: made_tokenizer(
        PLAIN, normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    ),
    "stripped": lambda: made_tokenizer(PLAIN, normalizers.Strip()),
    "tokens that swallow spaces": lambda: made_tokenizer(
        [AddedToken("<|im_start|>", special=True, normalized=False, rstrip=True, lstrip=True), *PLAIN[1:]]
    ),
    "tokens that overlap": lambda: made_tokenizer(
        [*PLAIN, *(AddedToken(text, special=text[0] == "<", normalized=False) for text in ("<|im_end|><s>", "d<s>"))]
    ),
    "normalized tokens": lambda: made_tokenizer(
        [*PLAIN, AddedToken("<X>", special=True, normalized=True)], normalizers.Lowercase()
    ),
    "split by words": lambda: made_tokenizer(PLAIN, pre_tokenizer=pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(real_model, tiny_model):
    loaded = {"real": real_model, "by byte": tiny_model("llama")}
    made = {name: make() for name, make in MADE.items()}
    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in loaded.items()} | made


def plain_ids(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("name", ["real", "by byte", *MADE])
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(WORDS), max_size=30), again=st.lists(st.sampled_from(WORDS), max_size=10))
def test_ids_are_those_of_the_whole_text(name, tokenizers, parts, again):
    tokenizer = tokenizers[name]
    whole = plain_ids(tokenizer)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(token_pieces, "SHORTEST_PIECE", 1)
        pieces = TokenPieces(tokenizer, whole)
        for text in ("".join(parts), "".join(parts + again), "".join(parts)):
            assert pieces.ids(text) == whole(text)


def test_of_a_conversation_only_new_turns_are_tokenized(real_model):
    tokenizer = Tokenizer(real_model)
    asked, plain = [], tokenizer._plain_ids
    tokenizer._pieces._ids_of = lambda text: asked.append(text) or plain(text)
    turns = [Turn("system", "You are a helpful assistant. " * 40)]
    for number in range(6):
        turns.append(Turn("user", f"question {number}: " + "why is the sky blue? " * 50))
        asked.clear()
        ids = tokenizer.encode_chat(turns)
        rendered = tokenizer._tokenizer.apply_chat_template(
            [{"role": turn.role, "content": turn.content} for turn in turns], tokenize=False, add_generation_prompt=True
        )
        assert ids == plain(rendered)
        assert sum(map(len, asked)) < 3000 or number == 0
        assert tokenizer.encode(rendered) == ids  # the same conversation as text
        turns.append(Turn("assistant", f"because {number}. " + "light is scattered. " * 50))
    assert len(rendered) > 10_000


def test_memory_is_bounded_and_threads_agree(tokenizers, monkeypatch):
    monkeypatch.setattr(token_pieces, "MOST_BYTES", 20_000)
    tokenizer = tokenizers["real"]
    whole = plain_ids(tokenizer)
    pieces = TokenPieces(tokenizer, whole)
    rng = random.Random(0)
    turns = ["<|im_start|>" + " ".join(rng.choices(["red", "blue", "green"], k=rng.randint(1, 60))) for _ in range(60)]
    texts = ["".join(rng.choices(turns, k=8)) for _ in range(200)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(pieces.ids, texts)) == list(map(whole, texts))
    assert 0 < pieces._num_bytes <= 20_000
    assert pieces._num_bytes == sum(token_pieces._size(text, ids) for text, ids in pieces._known.items())
