"""Turns the output of one completion into responses: text without stop strings, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable

from protos import inference_pb2
from router.output_stream import Ended, Position, Tokens
from router.request import Request
from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer


class Completion:
    """One of a request's n completions. Reads its output and makes responses."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        self.request, self.index, self._tokenizer = request, index, tokenizer
        self.num_tokens = 0
        """Output tokens so far, the ending token included."""
        self.is_stopped = False
        """A stop string was found, so workers have to be told that this completion has ended."""
        self.is_over = False
        """The last response was made."""
        checked = request.checked
        self._detokenizer = tokenizer.detokenizer(checked.include_special_tokens)
        self._stops = StopStrings(checked.stop_strings, checked.include_stop)
        self._hidden = {} if checked.include_special_tokens or not checked.stop_strings else tokenizer.special_tokens
        """Texts of hidden tokens, by id. Stop strings can match these texts."""
        self._last = inference_pb2.GenerateResponse(request_id=checked.request_id, index=index)

    def take(self) -> list[inference_pb2.GenerateResponse]:
        """Responses for the output since the last call. Raises the RequestError that ended the request.

        The finish reason comes with the last text if both are known. Clients that count messages would take a separate
        message for one more token.
        """
        responses: list[inference_pb2.GenerateResponse] = []
        for event in self.request.output.take():
            if isinstance(event, Ended):
                if event.error is not None:
                    raise event.error
                self.is_over = True
                self._finish(responses)
            elif not self._last.finish_reason:  # else the tokens are after a stop string
                response = self._read(event)
                if response.text or response.token_ids or response.logprobs or response.prompt_logprobs:
                    responses.append(response)
        return responses

    def _read(self, tokens: Tokens) -> inference_pb2.GenerateResponse:
        checked = self.request.checked
        if not (checked.stop_strings or tokens.finish_reason):  # as most tokens are
            self.num_tokens += len(tokens.token_ids)
            return self._response(tokens, tokens.token_ids, self._detokenizer.add(tokens.token_ids))
        text: list[str] = []
        num_read = 0
        for token in tokens.token_ids:
            num_read += 1
            self.num_tokens += 1
            is_last = num_read == len(tokens.token_ids) and tokens.finish_reason
            shown = self._stops.add(self._text(token, tokens, is_last=bool(is_last)), self._may_stop())
            if token in self._hidden and not self._ends_by(tokens, is_last=bool(is_last)):
                shown += self._stops.add(self._hidden[token], self._may_stop(), is_hidden=True)
            text.append(shown)
            if self._stops.matched is not None:
                self.is_stopped = not is_last
                self._last.finish_reason = inference_pb2.FINISH_REASON_STOP
                self._last.stop_reason = self._stops.matched
                break
        else:
            if tokens.finish_reason:
                text.append(self._stops.finish())
                self._note_end(tokens)
        return self._response(tokens, tokens.token_ids[:num_read], "".join(text))

    def _response(self, tokens: Tokens, token_ids: tuple[int, ...], text: str) -> inference_pb2.GenerateResponse:
        """A response with the first of some tokens."""
        checked = self.request.checked
        response = inference_pb2.GenerateResponse(request_id=checked.request_id, index=self.index, text=text)
        if checked.return_token_ids:
            response.token_ids.extend(token_ids)
        if tokens.logprobs:
            response.logprobs.extend(self._logprobs(tokens.logprobs[: len(token_ids)]))
        if tokens.prompt_logprobs:
            response.prompt_logprobs.extend(self._logprobs(tokens.prompt_logprobs))
        return response

    def _text(self, token: int, tokens: Tokens, is_last: bool) -> str:
        """The text that a token makes final. An ending token has no text unless include_stop is set."""
        is_left_out = self._ends_by(tokens, is_last) and not self.request.checked.include_stop
        text = "" if is_left_out else self._detokenizer.add((token,))
        return text + self._detokenizer.finish() if is_last else text

    @staticmethod
    def _ends_by(tokens: Tokens, is_last: bool) -> bool:
        """Whether a token is the stop token or end-of-sequence token that ended the output."""
        return is_last and tokens.finish_reason == inference_pb2.FINISH_REASON_STOP

    def _may_stop(self) -> bool:
        return self.num_tokens >= self.request.checked.stop.min_tokens

    def _note_end(self, tokens: Tokens) -> None:
        """Records the finish reason of a worker."""
        ending = tokens.token_ids[-1]
        self._last.finish_reason = tokens.finish_reason
        is_stop = tokens.finish_reason == inference_pb2.FINISH_REASON_STOP
        if is_stop and ending not in self.request.checked.eos_token_ids:
            self._last.stop_reason = str(ending)

    def _logprobs(self, positions: Iterable[Position]) -> list[inference_pb2.PositionLogprobs]:
        return [
            inference_pb2.PositionLogprobs(chosen=entries[0], top=entries[1:])
            for entries in (
                [
                    inference_pb2.TokenLogprob(
                        token_id=token, logprob=value, token_bytes=self._tokenizer.token_bytes(token)
                    )
                    for token, value in zip(position.token_ids, position.logprobs, strict=True)
                ]
                for position in positions
            )
        ]

    def take_end(self, responses: list[inference_pb2.GenerateResponse]) -> list[inference_pb2.GenerateResponse]:
        """Like `take`, after `responses`, which were not sent yet. Merges the end into the last response."""
        for response in self.take():
            if responses and response.finish_reason and not response.text:
                responses[-1].MergeFrom(response)
            else:
                responses.append(response)
        return responses

    def _finish(self, responses: list[inference_pb2.GenerateResponse]) -> None:
        request, last = self.request, self._last
        last.usage.prompt_tokens = len(request.checked.prompt_token_ids)
        last.usage.cached_tokens = request.num_cached_tokens
        last.usage.completion_tokens = self.num_tokens
        last.timings.CopyFrom(request.ordered_timings())
        last.kv_transfer.CopyFrom(request.kv_transfer)
        last.seed = request.checked.sampling.seed
        if responses:
            responses[-1].MergeFrom(last)
        else:
            responses.append(last)
