"""Stop strings: found across tokens, cut exactly, never leaked early."""

from __future__ import annotations

from collections.abc import Sequence as Seq


class StopStrings:
    """Cuts a stream of text at the first stop string, without ever leaking the beginning of one.

    Stops are looked for in all that was generated; text that is not to be shown, of special tokens, is left out of what
    is given back.
    """

    def __init__(self, stops: Seq[str], include_stop: bool) -> None:
        self._stops, self._include_stop = tuple(stops), include_stop
        self._held = ""
        self._hidden: list[tuple[int, int]] = []
        """Ranges of the held text that are not shown, in order."""
        self._num_passed = 0
        """Characters of the held text in which no stop string may end."""
        self.matched: str | None = None

    def add(self, text: str, may_stop: bool = True, is_hidden: bool = False) -> str:
        """The text that can be shown now. After a match, `matched` says which stop it was and nothing more comes.

        may_stop: whether a stop string may end in this text; one that does otherwise is text like any other.
        is_hidden: it counts for stop strings, and is not shown.
        """
        if self.matched is not None:
            return ""
        if is_hidden and text:
            self._hidden.append((len(self._held), len(self._held) + len(text)))
        self._held += text
        if not may_stop:
            self._num_passed = len(self._held)
        found = [(place, stop) for stop in self._stops if (place := self._find(stop)) >= 0]
        if found:
            start, self.matched = min(found, key=lambda match: (match[0], -len(match[1])))
            shown = self._take(start)
            self._held, self._hidden = "", []
            # Whoever asks for the stop itself sees it, hidden or not.
            return shown + self.matched if self._include_stop else shown
        return self._take(len(self._held) - self._possible_beginning())

    def _take(self, num_characters: int) -> str:
        """Takes so much from the held text. Returns what of it is shown."""
        shown, start = [], 0
        for low, high in self._hidden:
            shown.append(self._held[start : max(start, min(low, num_characters))])
            start = min(high, num_characters)
        shown.append(self._held[start:num_characters])
        self._held = self._held[num_characters:]
        moved = ((max(0, low - num_characters), high - num_characters) for low, high in self._hidden)
        self._hidden = [(low, high) for low, high in moved if high > 0]
        self._num_passed = max(0, self._num_passed - num_characters)
        return "".join(shown)

    def _find(self, stop: str) -> int:
        """Where a stop string begins that ends behind the text in which none may end; -1: nowhere."""
        return self._held.find(stop, max(0, self._num_passed - len(stop) + 1))

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        return self._take(len(self._held))

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string may begin."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
