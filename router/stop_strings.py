"""Stop strings: found across tokens, cut exactly, never leaked early."""

from __future__ import annotations

from collections.abc import Sequence as Seq


class StopStrings:
    """Cuts a stream of text at the first stop string, without ever leaking the beginning of one."""

    def __init__(self, stops: Seq[str], include_stop: bool) -> None:
        self._stops, self._include_stop = tuple(stops), include_stop
        self._held = ""
        self._num_passed = 0
        """Characters of the held text in which no stop string may end."""
        self.matched: str | None = None

    def add(self, text: str, may_stop: bool = True) -> str:
        """The text that can be shown now. After a match, `matched` says which stop it was and nothing more comes.

        may_stop: whether a stop string may end in this text; one that does otherwise is text like any other.
        """
        if self.matched is not None:
            return ""
        self._held += text
        if not may_stop:
            self._num_passed = len(self._held)
        found = [(place, stop) for stop in self._stops if (place := self._find(stop)) >= 0]
        if found:
            start, self.matched = min(found, key=lambda match: (match[0], -len(match[1])))
            end = start + len(self.matched) if self._include_stop else start
            shown, self._held = self._held[:end], ""
            return shown
        num_shown = len(self._held) - self._possible_beginning()
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        self._num_passed = max(0, self._num_passed - num_shown)
        return shown

    def _find(self, stop: str) -> int:
        """Where a stop string begins that ends behind the text in which none may end; -1: nowhere."""
        return self._held.find(stop, max(0, self._num_passed - len(stop) + 1))

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
