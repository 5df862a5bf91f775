"""Token counts of a sequence, for penalties."""

from __future__ import annotations

from array import array


class TokenHistory:
    """Distinct tokens in order of first appearance, each with its number of occurrences in the output.

    Each update reads only the new tokens of the sequence.
    """

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.output_counts = array("i")
        self._index_of: dict[int, int] = {}
        self._num_read = 0

    def update(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Counts the tokens that were added since the last call. token_ids: prompt, then output."""
        for position in range(self._num_read, len(token_ids)):
            token = token_ids[position]
            index = self._index_of.setdefault(token, len(self.token_ids))
            if index == len(self.token_ids):
                self.token_ids.append(token)
                self.output_counts.append(0)
            if position >= num_prompt_tokens:
                self.output_counts[index] += 1
        self._num_read = len(token_ids)
