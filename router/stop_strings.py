"""Finds stop strings in streamed text, also across tokens, and cuts the text exactly there."""

from __future__ import annotations

from collections.abc import Sequence as Seq


class StopStrings:
    """Cuts a stream of text at the first stop string. Text that may begin a stop string is held back.

    Hidden text, of special tokens, can match stop strings too, but is not returned.
    """

    def __init__(self, stops: Seq[str], include_stop: bool) -> None:
        self._stops, self._include_stop = tuple(stops), include_stop
        self._held = ""
        self._hidden: list[tuple[int, int]] = []
        """Ranges of the held text that are hidden, in order."""
        self._num_passed = 0
        """Length of the prefix of the held text in which no stop string may end."""
        self.matched: str | None = None

    def add(self, text: str, may_stop: bool = True, is_hidden: bool = False) -> str:
        """Adds text, and returns the text that can be shown now. After a match, `matched` is the stop string, and later
        calls return nothing.

        may_stop: whether a stop string may end in this text. If False, such a stop string is ordinary text.
        is_hidden: whether the text is only matched with stop strings, and not shown.
        """
        if self.matched is not None:
            return ""
        if is_hidden and text:
            self._hidden.append((len(self._held), len(self._held) + len(text)))
        self._held += text
        if not may_stop:
            self._num_passed = len(self._held)
        found = [(start, stop) for stop in self._stops if (start := self._find(stop)) >= 0]
        if found:
            start, self.matched = min(found, key=lambda match: (match[0], -len(match[1])))
            shown = self._take(start)
            self._held, self._hidden = "", []
            # With include_stop the stop string is shown even if its text is hidden.
            return shown + self.matched if self._include_stop else shown
        return self._take(len(self._held) - self._possible_beginning())

    def _take(self, num_characters: int) -> str:
        """Removes a prefix from the held text. Returns its visible part."""
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
        """Start of the first match that ends after the first `_num_passed` characters; -1: no match."""
        return self._held.find(stop, max(0, self._num_passed - len(stop) + 1))

    def finish(self) -> str:
        """Returns the held text: no stop string is coming any more."""
        return self._take(len(self._held))

    def _possible_beginning(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
