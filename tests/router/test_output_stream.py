"""What a client's reader gets: tokens in order, merged, and the end."""

from __future__ import annotations

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.output_stream import Ended, OutputStream, Position, Tokens
from rpc.errors import Unavailable

RUNNING, STOP = pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_STOP


def output(*token_ids, finish=RUNNING, logprobs=None, prompt_logprobs=None):
    return wpb.TokenOutput(
        token_ids=token_ids, finish_reason=finish, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )


def test_what_waits_is_taken_once_and_merged_in_order():
    stream = OutputStream()
    assert stream.take() == []
    stream.add(output(1, 2))
    stream.add(output(3, finish=STOP))
    assert stream.num_waiting == 3
    assert stream.take() == [Tokens((1, 2, 3), STOP)]
    assert stream.num_waiting == 0
    assert stream.take() == []


def test_the_end_comes_after_the_tokens():
    stream = OutputStream()
    stream.add(output(1))
    stream.end(None)
    assert stream.take() == [Tokens((1,), RUNNING), Ended(None)]
    assert stream.take() == []


def test_an_error_drops_the_tokens_that_wait():
    stream, error = OutputStream(), Unavailable("gone")
    stream.add(output(1))
    stream.end(error)
    assert stream.num_waiting == 0
    assert stream.take() == [Ended(error)]


def test_logprobs_are_cut_into_positions():
    """Each position has the sampled token and `num_top` more; two outputs may have different numbers."""
    stream = OutputStream()
    prompt = wpb.Logprobs(num_top=0, token_ids=[8, 9], logprobs=[-8.0, -9.0])
    stream.add(
        output(1, logprobs=wpb.Logprobs(num_top=1, token_ids=[1, 5], logprobs=[-1.0, -0.5]), prompt_logprobs=prompt)
    )
    stream.add(output(2, logprobs=wpb.Logprobs(num_top=0, token_ids=[2], logprobs=[-2.0])))
    [tokens] = stream.take()
    assert tokens.logprobs == (Position((1, 5), (-1.0, -0.5)), Position((2,), (-2.0,)))
    assert tokens.prompt_logprobs == (Position((8,), (-8.0,)), Position((9,), (-9.0,)))


def test_has_output_is_set_by_tokens_and_by_the_end():
    for change in (lambda stream: stream.add(output(1)), lambda stream: stream.end(None)):
        stream = OutputStream()
        assert not stream.has_output.is_set()
        change(stream)
        assert stream.has_output.is_set()
