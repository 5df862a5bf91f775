"""Both detokenizers: pieces join to the whole, no half characters, nothing held back without need."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenizer import ByteDetokenizer, WindowDetokenizer
from router.tokenizer import Tokenizer
from tests.tiny_models import save_metaspace_tokenizer

TEXTS = [
    "Hello, world.  Two spaces.\n\tTab. Then a stop",
    "Repeat exactly: 😀👋🏽 ď ábelské 한국어 中文",
    "e\u0301 combining, \u200d joined 👨‍👩‍👧‍👦",
    " leading space",
]


@pytest.fixture(scope="module")
def tokenizers(tiny_model, real_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("metaspace")
    return {
        "bytes": Tokenizer(tiny_model("llama")),
        "byte-level": Tokenizer(real_model),
        "fallback": Tokenizer(save_metaspace_tokenizer(folder / "fallback", byte_fallback=True)),
        "metaspace": Tokenizer(save_metaspace_tokenizer(folder / "metaspace", byte_fallback=False)),
    }


def both(tokenizer):
    """The one in use, and the window in its place.

    Not with byte fallback: its own decoder makes a whole run of bytes unreadable if the last character is unfinished.
    """
    if tokenizer._token_bytes.strips_first_space:
        return [tokenizer.detokenizer()]
    window = WindowDetokenizer(
        lambda ids: tokenizer._tokenizer.decode(list(ids), skip_special_tokens=True),
        lambda token: token not in tokenizer._token_bytes.special_ids,
    )
    return [tokenizer.detokenizer(), window]


def test_each_kind_of_tokenizer_gets_the_detokenizer_that_fits(tokenizers):
    kinds = {name: type(t.detokenizer()) for name, t in tokenizers.items()}
    assert kinds == {
        "bytes": ByteDetokenizer,
        "byte-level": ByteDetokenizer,
        "fallback": ByteDetokenizer,
        "metaspace": WindowDetokenizer,
    }


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["bytes", "byte-level", "fallback", "metaspace"])
def test_pieces_join_to_the_whole_and_never_show_half_a_character(text, name, tokenizers):
    """Casebook C002, C003."""
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text)
    whole = tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    assert name == "metaspace" or whole == text
    for detokenizer in both(tokenizer):
        pieces = [detokenizer.add([token]) for token in ids] + [detokenizer.finish()]
        assert "".join(pieces) == whole == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", ["bytes", "byte-level", "fallback", "metaspace"])
@given(parts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3), rng=st.randoms())
def test_tokens_that_come_together_give_the_same_text(name, tokenizers, parts, rng):
    """Tokens that waited for a slow client are read at once."""
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("".join(parts))
    for one_by_one, several in zip(both(tokenizer), both(tokenizer), strict=True):
        expected = "".join(one_by_one.add([token]) for token in ids) + one_by_one.finish()
        pieces, at = [], 0
        while at < len(ids):
            count = rng.randint(1, 9)
            pieces.append(several.add(ids[at : at + count]))
            at += count
        assert "".join(pieces) + several.finish() == expected


@pytest.mark.parametrize("name", ["bytes", "byte-level", "fallback", "metaspace"])
def test_ascii_text_is_never_held_back(name, tokenizers):
    """Casebook C006."""
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    for detokenizer in both(tokenizer):
        held = [n for n, token in enumerate(ids) if not detokenizer.add([token])]
        # SentencePiece: the first token may be nothing but the space that is not shown.
        assert held in ([], [0]), held


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
def test_what_can_not_become_a_character_any_more_is_shown_at_once(name, tokenizers):
    """Casebook C011: invalid bytes, and text that truly has U+FFFD."""
    tokenizer = tokenizers[name]
    byte = {raw: token for token in range(400) if len(raw := tokenizer.token_bytes(token)) == 1}
    endless = tokenizer.detokenizer()
    assert "".join(endless.add([byte[b"\x80"]]) for _ in range(50)) == "\ufffd" * 50
    detokenizer = tokenizer.detokenizer()
    shown = "".join(detokenizer.add([token]) for token in tokenizer.encode("a\ufffd"))
    assert shown == "a\ufffd"
    mixed = tokenizer.detokenizer()
    assert [mixed.add([byte[raw]]) for raw in (b"a", b"\xf0", b"\x9f", b"b")] == ["a", "", "", "\ufffdb"]


def test_an_answer_that_ends_inside_a_character_keeps_its_tail(tokenizers):
    """Casebook C005."""
    tokenizer = tokenizers["bytes"]
    ids = tokenizer.encode("x😀")[:3]
    for detokenizer in both(tokenizer):
        assert [detokenizer.add([token]) for token in ids] == ["x", "", ""]
        assert detokenizer.finish() == "\ufffd"
    assert tokenizer.decode(ids) == "x\ufffd"


@given(st.binary(max_size=40), st.randoms())
def test_any_bytes_become_the_text_that_the_tokenizer_decodes(raw, rng):
    """Python and the tokenizers library agree on where replacement marks go."""
    tokenizer = _bytes_tokenizer()
    byte = {tokenizer.token_bytes(token)[0]: token for token in range(2, 258)}
    ids = [byte[value] for value in raw]
    whole = tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    assert whole == tokenizer.decode(ids) == raw.decode("utf-8", "replace")
    window = both(tokenizer)[1]
    pieces, rest = [], ids
    while rest:
        size = rng.randint(1, 4)
        pieces.append(window.add(rest[:size]))
        rest = rest[size:]
    assert "".join(pieces) + window.finish() == whole


_cached = []


def _bytes_tokenizer():
    return _cached[0]


@pytest.fixture(scope="module", autouse=True)
def _keep_bytes_tokenizer(tokenizers):
    _cached[:] = [tokenizers["bytes"]]


def test_random_ids_join_to_the_whole(tokenizers):
    """Casebook C009: whatever a hot temperature brings, special tokens too."""
    rng = random.Random(0)
    tokenizer = tokenizers["byte-level"]
    for include in (False, True):
        for _ in range(50):
            ids = rng.choices(range(49152), k=40)
            detokenizer = tokenizer.detokenizer(include)
            joined = "".join(detokenizer.add([token]) for token in ids) + detokenizer.finish()
            assert joined == tokenizer._tokenizer.decode(ids, skip_special_tokens=not include)
            joined.encode("utf-8")


@pytest.mark.parametrize("name", ["bytes", "byte-level", "metaspace"])
def test_special_tokens_show_only_when_asked_for(name, tokenizers):
    """Casebook C008."""
    tokenizer = tokenizers[name]
    special = max(tokenizer._token_bytes.special_ids)
    ids = [*tokenizer.encode("hi"), special, *tokenizer.encode("yo")]
    name_of_it = tokenizer._tokenizer.convert_ids_to_tokens(special)
    assert name_of_it not in tokenizer.decode(ids)
    assert name_of_it in tokenizer.decode(ids, include_special_tokens=True)
    for include in (False, True):
        detokenizer = tokenizer.detokenizer(include)
        streamed = "".join(detokenizer.add([token]) for token in ids) + detokenizer.finish()
        assert streamed == tokenizer.decode(ids, include)


def test_token_bytes_tell_partial_characters_apart(tokenizers):
    """Casebook C010."""
    for name in ("bytes", "byte-level", "fallback"):
        tokenizer = tokenizers[name]
        ids = tokenizer.encode("😀")
        joined = b"".join(tokenizer.token_bytes(token) for token in ids)
        assert joined.decode().strip() == "😀"
    assert tokenizers["bytes"].token_bytes(10_000) == b"", "ids that only the model knows"


def test_a_tokenizer_that_would_clean_up_spaces_does_not_take_letters_away(tmp_path):
    """What was shown can't be taken back, so spaces are never cleaned up."""
    tokenizer = Tokenizer(save_metaspace_tokenizer(tmp_path, byte_fallback=False))
    tokenizer._tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer.encode("it . so , he . the end")
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add([token]) for token in ids] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "so , he" in tokenizer.decode(ids)
