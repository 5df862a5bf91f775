"""`kvferry chat`: a conversation at the keyboard, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from engine.model_store import cache_folder
from kvferry.client import Client, KvferryError

HELP = """\
/help            this
/clear           forget the conversation; the system message stays
/system TEXT     set the system message, and begin anew; without TEXT there is none
/exit, Ctrl-D    end
Ctrl-C           stop an answer, or drop what is typed
Alt-Enter        a new line within a message; pasted lines are one message
Up, Down         what was said before"""


class Conversation:
    """The turns so far."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []

    def messages(self) -> list[dict[str, str]]:
        """As they are sent."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def command(self, line: str) -> str | None:
        """Does what a line that begins with / says. Returns what to show; None: end."""
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                return HELP
            case "/clear":
                self.turns.clear()
                return "forgotten"
            case "/system":
                self.system = rest.strip()
                self.turns.clear()
                return "a new conversation, with that system message" if self.system else "a new conversation"
            case "/exit" | "/quit":
                return None
        return f"there is no {name}; /help shows what there is. A message that begins with / can begin with a space."


def run_chat(client: Client, conversation: Conversation, options: dict[str, Any]) -> int:
    """Talks until the input ends. options: of `Client.generate`. Returns the exit code."""
    console = Console(highlight=False)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        console.print("Enter sends, /help shows more, Ctrl-D ends.", style="dim")
    for line in _lines(is_terminal):
        if not line.strip():
            continue
        if line.startswith("/"):
            shown = conversation.command(line)
            if shown is None:
                break
            console.print(Text(shown, "dim"))
            continue
        _answer(client, conversation, line.strip(), options, console)
    return 0


def _answer(client: Client, conversation: Conversation, said: str, options: dict[str, Any], console: Console) -> None:
    """One turn. What failed or was stopped is no part of the conversation."""
    conversation.turns.append({"role": "user", "content": said})
    console.print("model> ", style="bold green", end="")
    stream = client.generate(conversation.messages(), **options)
    try:
        for piece in stream:
            print(piece.text, end="", flush=True)
        print()
        conversation.turns.append({"role": "assistant", "content": stream.result().text})
    except KvferryError as error:
        print(f"\nkvferry: error: {error}", file=sys.stderr)
        conversation.turns.pop()
    except KeyboardInterrupt:
        stream.cancel()
        print()
        conversation.turns.pop()


def _lines(is_terminal: bool) -> Iterator[str]:
    if not is_terminal:
        with contextlib.suppress(KeyboardInterrupt):
            for raw in sys.stdin.buffer:
                # Whatever bytes come: what is no UTF-8 is shown as that.
                yield raw.decode("utf-8", "replace").rstrip("\r\n")
        return
    read = _line_editor()
    while True:
        try:
            line = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        yield line.encode("utf-8", "replace").decode()


def _line_editor() -> Callable[[], str]:
    """Reads a message with line editing, history over sessions, and pasted lines as one message."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    with contextlib.suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        history = FileHistory(str(cache_folder() / "chat_history"))
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys)
    return lambda: session.prompt(FormattedText([("bold ansicyan", "you> ")]))
