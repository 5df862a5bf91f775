"""Text in pieces joins to the text of the whole, and stop strings never leak."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer, Turn, _eos_token_ids
from rpc.errors import InvalidArgument


@pytest.fixture(scope="module")
def real(real_model):
    return Tokenizer(real_model)


@pytest.fixture(scope="module")
def by_byte(tiny_model):
    """A tokenizer whose tokens are single bytes."""
    return Tokenizer(tiny_model("llama"))


TEXTS = [
    "Hello, world.  Two spaces.\n\tTab",
    "Repeat exactly: 😀👋🏽 ď ábelské 한국어 中文",
    "e\u0301 combining, \u200d joined 👨‍👩‍👧‍👦",
    "a\ufffd",
    " leading space",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("which", ["real", "by_byte"])
def test_pieces_join_to_the_whole_and_never_show_half_a_character(text, which, request):
    """Casebook C002, C003, C011."""
    tokenizer = request.getfixturevalue(which)
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add([token]) for token in ids]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == tokenizer.decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_ascii_text_is_never_held_back(real):
    """Casebook C006."""
    detokenizer = real.detokenizer()
    assert all(detokenizer.add([token]) for token in real.encode("The quick brown fox jumps over the lazy dog."))


def test_an_answer_that_ends_inside_a_character_keeps_its_tail(by_byte):
    """Casebook C005."""
    ids = by_byte.encode("😀")[:2]
    detokenizer = by_byte.detokenizer()
    assert [detokenizer.add([token]) for token in ids] == ["", ""]
    assert detokenizer.finish() == by_byte.decode(ids)


def test_random_ids_join_to_the_whole(real):
    """Casebook C009: whatever a hot temperature brings."""
    rng = random.Random(0)
    for _ in range(50):
        ids = rng.choices(range(3, 49152), k=40)
        detokenizer = real.detokenizer()
        joined = "".join(detokenizer.add([token]) for token in ids) + detokenizer.finish()
        assert joined == real.decode(ids)
        joined.encode("utf-8")


def test_a_chat_is_rendered_by_the_template_without_a_second_bos(real):
    """Casebook C052."""
    ids = real.encode_chat([Turn("user", "hi")])
    assert (
        ids
        == real._tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=True, add_generation_prompt=True
        )["input_ids"]
    )


def test_a_role_the_template_refuses_is_the_clients_error(by_byte):
    with pytest.raises(InvalidArgument, match="unknown role robot"):
        by_byte.encode_chat([Turn("robot", "hi")])


@pytest.mark.parametrize(
    "failing", ["{{ 1 // 0 }}", "{{ messages[0].content.nothing() }}", "{{ messages | frobnicate }}"]
)
def test_whatever_a_template_raises_is_the_clients_error(failing, tiny_model):
    tokenizer = Tokenizer(tiny_model("llama"))
    tokenizer._tokenizer.chat_template = failing
    with pytest.raises(InvalidArgument, match="the model's chat template rejects this conversation"):
        tokenizer.encode_chat([Turn("user", "hi")])


def test_a_model_without_a_template_says_what_to_send(tiny_model):
    tokenizer = Tokenizer(tiny_model("llama"))
    tokenizer._tokenizer.chat_template = None
    with pytest.raises(InvalidArgument, match="no chat template; send text or token_ids"):
        tokenizer.encode_chat([Turn("user", "hi")])


def test_a_text_that_begins_with_bos_gets_no_second_one(tiny_model):
    """Casebook C052: the same chat as messages, as rendered text and as ids."""
    tokenizer = Tokenizer(tiny_model("llama"))
    backend = tokenizer._tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert tokenizer.encode("hi") == [0, *tokenizer.encode("hi")[1:]]
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")
    assert tokenizer.encode("hi")[:2] != [0, 0]
    tokenizer._tokenizer.chat_template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    as_messages = tokenizer.encode_chat([Turn("user", "hi")])
    assert as_messages == tokenizer.encode("<s>hi")


def test_all_that_name_an_end_of_sequence_are_heard(real, by_byte, tmp_path, tiny_model):
    assert (real.eos_token_ids, by_byte.eos_token_ids) == ((2,), (1,))
    plain = Tokenizer(tiny_model("llama"))._tokenizer
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": [6]}}')
    assert _eos_token_ids(tmp_path, plain, frozenset()) == (1, 5, 6)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert _eos_token_ids(tmp_path, plain, frozenset()) == (1, 5, 6, 7, 8)


def test_what_the_template_puts_behind_an_assistants_turn_ends_an_answer(tmp_path, tiny_model):
    """Some published models name only the end of text in their configs, and end a turn with another token."""
    plain = Tokenizer(tiny_model("llama"))._tokenizer
    plain.add_special_tokens({"additional_special_tokens": ["<|turn_ends|>"]})
    plain.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|turn_ends|>{% endfor %}"
    [end] = plain("<|turn_ends|>", add_special_tokens=False).input_ids
    assert _eos_token_ids(tmp_path, plain, frozenset({0, 1, end})) == (1, end)
    plain.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}, {% endfor %}"
    assert _eos_token_ids(tmp_path, plain, frozenset({0, 1, end})) == (1,)  # a comma is text
    plain.chat_template = "{{ raise_exception('never') }}"
    assert _eos_token_ids(tmp_path, plain, frozenset({0, 1, end})) == (1,)


def stream(stops, pieces, include_stop=False):
    matcher = StopStrings(stops, include_stop)
    shown = [matcher.add(piece) for piece in pieces]
    return shown, matcher.matched, matcher.finish()


def test_a_stop_string_across_pieces_is_cut_exactly():
    """Casebook C012, C013."""
    assert stream(["Paris"], ["It is P", "ar", "is, yes"]) == (["It is ", "", ""], "Paris", "")


def test_what_only_looked_like_a_stop_is_shown_as_soon_as_it_is_known():
    assert stream(["abc"], ["xa", "b", "d"]) == (["x", "", "abd"], None, "")
    assert stream(["abc"], ["xab"]) == (["x"], None, "ab")


def test_the_first_stop_in_the_text_wins_and_the_longer_one_at_equal_places():
    assert stream(["world", "wor", "o w"], ["hello world"])[:2] == (["hell"], "o w")
    assert stream(["wor", "world"], ["a world"])[1] == "world"


def test_include_stop_keeps_the_match_only():
    assert stream(["."], ["End", ". More"], include_stop=True)[:2] == (["End", "."], ".")


@pytest.mark.parametrize("stop", ["\n", "\\n", ".*", '"', "é", "🙂"])
def test_stops_are_literal(stop):
    """Casebook C022."""
    shown, matched, _ = stream([stop], ["before", stop, "after"])
    assert "".join(shown) == "before"
    assert matched == stop


@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.randoms()
)
def test_cutting_does_not_depend_on_the_pieces(text, stops, rng):
    found = [(text.find(s), -len(s), s) for s in stops if s in text]
    expected = text[: min(found)[0]] if found else text
    pieces, rest = [], text
    while rest:
        size = rng.randint(1, 4)
        pieces.append(rest[:size])
        rest = rest[size:]
    shown, matched, tail = stream(stops, pieces)
    # A longer stop that begins earlier may be complete only after a shorter one that begins later: both cuts are exact.
    joined = "".join(shown) + tail
    assert not any(s in joined for s in stops)
    assert text.startswith(joined)
    assert (matched is not None) == bool(found)
    if len(set(map(len, stops))) == 1:
        assert joined == expected


def test_hidden_text_counts_for_stops_and_is_not_shown():
    matcher = StopStrings(["<end>\nUser"], include_stop=False)
    shown = [matcher.add("Hi"), matcher.add("<end>", is_hidden=True), matcher.add("\nUs"), matcher.add("er: x")]
    assert (shown, matcher.matched) == (["Hi", "", "", ""], "<end>\nUser")
    matcher = StopStrings(["<end>\nUser"], include_stop=False)
    shown = [matcher.add("Hi"), matcher.add("<end>", is_hidden=True), matcher.add("\nUs"), matcher.add("ual")]
    assert ("".join(shown), matcher.matched) == ("Hi\nUsual", None)
    matcher = StopStrings(["xx"], include_stop=True)
    assert "".join([matcher.add("a<"), matcher.add("<b>", is_hidden=True), matcher.add("c"), matcher.finish()]) == "a<c"
