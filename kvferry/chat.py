"""`kvferry chat`: an interactive conversation, or one message per line from a pipe."""

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
/help            show this help
/clear           forget the conversation; the system message stays
/system TEXT     start a new conversation with this system message; without TEXT, with none
/exit, Ctrl-D    end
Ctrl-C           stop the output, or clear the input line
Alt-Enter        insert a line break; pasted lines form one message
Up, Down         browse earlier messages"""


class Conversation:
    """The turns so far."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []

    def messages(self) -> list[dict[str, str]]:
        """All messages of the next request, the system message first."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def command(self, line: str) -> str | None:
        """Runs a line that begins with /. Returns the text to show; None ends the chat."""
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                return HELP
            case "/clear":
                self.turns.clear()
                return "conversation cleared"
            case "/system":
                self.system = rest.strip()
                self.turns.clear()
                return "new conversation with this system message" if self.system else "new conversation"
            case "/exit" | "/quit":
                return None
        return f"unknown command {name}; /help lists the commands. A message may begin with a space and /."


def run_chat(client: Client, conversation: Conversation, options: dict[str, Any]) -> int:
    """Runs a chat until the input ends. options: of `Client.generate`. Returns the exit code."""
    console = Console(highlight=False)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        console.print("Enter sends a message, /help lists the commands, Ctrl-D ends the chat.", style="dim")
    for line in _lines(is_terminal):
        if not line.strip():
            continue
        if line.startswith("/"):
            shown = conversation.command(line)
            if shown is None:
                break
            console.print(Text(shown, "dim"))
            continue
        _send(client, conversation, line.strip(), options, console)
    return 0


def _send(client: Client, conversation: Conversation, message: str, options: dict[str, Any], console: Console) -> None:
    """One turn. A failed or stopped turn is removed from the conversation."""
    conversation.turns.append({"role": "user", "content": message})
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
                # Invalid UTF-8 is replaced, so that it does not end the chat.
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
    """Reads a message with line editing, history across sessions, and pasted lines as one message."""
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
