"""Which tokens a sequence has, and how often its output has them: what penalties look at."""

from __future__ import annotations

from array import array


class TokenHistory:
    """Distinct tokens in order of first appearance, with the number of times each is in the output.

    Grows with the sequence: each update reads only the tokens that are new.
    """

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.output_counts = array("i")
        self._place: dict[int, int] = {}
        self._num_read = 0

    def update(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Reads the tokens behind those read before. token_ids: prompt, then output."""
        for index in range(self._num_read, len(token_ids)):
            token = token_ids[index]
            place = self._place.setdefault(token, len(self.token_ids))
            if place == len(self.token_ids):
                self.token_ids.append(token)
                self.output_counts.append(0)
            if index >= num_prompt_tokens:
                self.output_counts[place] += 1
        self._num_read = len(token_ids)
