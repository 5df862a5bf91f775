"""A conversation at the keyboard, with a scripted model."""

from __future__ import annotations

import io
import sys

import grpc
import pytest

from kvferry import chat
from kvferry.chat import Conversation, run_chat
from kvferry.client import KvferryError, Piece


class ScriptedStream:
    def __init__(self, text, error):
        self.text, self.error = text, error

    def __iter__(self):
        yield Piece(text=self.text, token_ids=())
        if self.error:
            raise self.error

    def result(self):
        return self

    def cancel(self):
        self.cancelled = True


class ScriptedClient:
    """Answers each message with its number; errors by number."""

    def __init__(self, **errors):
        self.asked, self.errors = [], errors

    def generate(self, messages, **options):
        self.asked.append([(m["role"], m["content"]) for m in messages])
        return ScriptedStream(f"answer {len(self.asked)}", self.errors.get(f"on{len(self.asked)}"))


@pytest.fixture
def typed(monkeypatch):
    def give(raw):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))

    return give


def test_turns_are_sent_with_those_before(typed, capsys):
    typed(b"one\n\n  \ntwo\n")
    client = ScriptedClient()
    assert run_chat(client, Conversation("be brief"), {}) == 0
    system = ("system", "be brief")
    assert client.asked == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", "answer 1"), ("user", "two")],
    ]
    shown = capsys.readouterr().out
    assert shown.splitlines() == ["model> answer 1", "model> answer 2"]


def test_commands(typed, capsys):
    typed(b"/help\none\n/clear\ntwo\n/system talk like a ferry\nthree\n/frobnicate\n/exit\nnever\n")
    client = ScriptedClient()
    run_chat(client, Conversation(), {})
    assert client.asked == [[("user", "one")], [("user", "two")], [("system", "talk like a ferry"), ("user", "three")]]
    shown = capsys.readouterr().out
    assert "/system TEXT" in shown
    assert "unknown command /frobnicate" in shown


def test_bytes_that_are_no_utf8_do_not_end_it(typed):
    typed(b"caf\xe9\nstill here\n")
    client = ScriptedClient()
    run_chat(client, Conversation(), {})
    assert [asked[-1][1] for asked in client.asked] == ["caf\ufffd", "still here"]


def test_what_failed_or_was_stopped_is_no_part_of_the_conversation(typed, capsys):
    typed(b"one\ntwo\nthree\n")
    client = ScriptedClient(on1=KvferryError(grpc.StatusCode.UNAVAILABLE, "gone"), on2=KeyboardInterrupt())
    run_chat(client, Conversation(), {})
    assert client.asked[-1] == [("user", "three")]
    assert "UNAVAILABLE: gone" in capsys.readouterr().err


def test_pasted_lines_are_one_message_and_history_is_kept(monkeypatch, tmp_path):
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        read = chat._line_editor()
        keyboard.send_text("\x1b[200~first line\nsecond line\x1b[201~ and more\r")
        assert read() == "first line\nsecond line and more"
        keyboard.send_text("typed\x1b\rover two\r")
        assert read() == "typed\nover two"
        keyboard.send_text("wrnog\x7f\x7f\x7fong\r")
        assert read() == "wrong"
        keyboard.send_text("\x1b[A\r")  # up: what was said before
        assert read() == "wrong"
    assert "first line" in (tmp_path / "chat_history").read_text()
