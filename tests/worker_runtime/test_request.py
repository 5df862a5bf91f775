"""A request at a worker: what is refused before the engine sees it, and what its router hears of each token."""

from __future__ import annotations

import math

import pytest

from engine.logprobs import TokenLogprobs
from engine.sampler import SampledToken
from kv_transfer.request_ref import RequestRef
from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from tests.scripted import VOCAB, FakeClock
from worker_runtime.request import WorkerRequest, check_spec

RUNNING, STOP, LENGTH = pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


def make_spec(token_ids=(1, 2, 3), num_prompt_tokens=3, sampling=None, stop=None, **options):
    return wpb.SequenceSpec(
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        sampling=wpb.SamplingConfig(**({"top_p": 1.0, "repetition_penalty": 1.0} | (sampling or {}))),
        stop=wpb.StopConfig(**({"max_tokens": 3} | (stop or {}))),
        **options,
    )


def make_request(**options):
    clock = FakeClock()
    return WorkerRequest.from_spec(1, RequestRef("r", 0), make_spec(**options), clock.now), clock


class TestCheckSpec:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"token_ids": (0, VOCAB - 1, 2, 3)},  # output of an earlier attempt after the prompt
            {"sampling": {"top_p": 1e-9, "min_p": 1.0, "temperature": 100.0}},
            {"sampling": {"bias_token_ids": [0, VOCAB - 1], "biases": [-100.0, 100.0]}},
            {"stop": {"max_tokens": 1, "stop_token_ids": [0, VOCAB - 1]}},
        ],
    )
    def test_taken(self, options):
        assert check_spec(make_spec(**options), VOCAB) is None

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"token_ids": ()}, "num_prompt_tokens is 3 of 0 token ids"),
            ({"num_prompt_tokens": 0}, "num_prompt_tokens is 0 of 3 token ids"),
            ({"num_prompt_tokens": 4}, "num_prompt_tokens is 4 of 3 token ids"),
            ({"token_ids": (1, -1, 2)}, "found -1 to 2"),
            ({"token_ids": (1, VOCAB, 2)}, f"found 1 to {VOCAB}"),
            ({"sampling": {"bias_token_ids": [1]}}, "1 tokens have 0 biases"),
            ({"sampling": {"bias_token_ids": [1, 1], "biases": [1.0, 2.0]}}, "a token has two biases"),
            ({"sampling": {"bias_token_ids": [VOCAB], "biases": [1.0]}}, "bias_token_ids"),
            ({"sampling": {"bias_token_ids": [-1], "biases": [1.0]}}, "bias_token_ids"),
            ({"sampling": {"bias_token_ids": [1], "biases": [math.inf]}}, "finite"),
            ({"stop": {"stop_token_ids": [VOCAB]}}, "stop_token_ids"),
            ({"stop": {"stop_token_ids": [-1]}}, "stop_token_ids"),
            ({"stop": {"max_tokens": 0}}, "max_tokens is 0"),
            ({"sampling": {"temperature": -0.1}}, "temperature -0.1"),
            ({"sampling": {"temperature": math.nan}}, "temperature nan"),
            ({"sampling": {"temperature": math.inf}}, "finite"),
            ({"sampling": {"top_p": 0.0}}, "top_p 0.0"),
            ({"sampling": {"top_p": 1.1}}, "top_p 1.1"),
            ({"sampling": {"min_p": -0.1}}, "min_p -0.1"),
            ({"sampling": {"min_p": 1.1}}, "min_p 1.1"),
            ({"sampling": {"repetition_penalty": 0.0}}, "repetition_penalty is 0.0"),
            ({"sampling": {"repetition_penalty": math.nan}}, "repetition_penalty is nan"),
            ({"sampling": {"presence_penalty": math.nan}}, "finite"),
            ({"sampling": {"frequency_penalty": -math.inf}}, "finite"),
        ],
    )
    def test_refused(self, options, reason):
        assert reason in check_spec(make_spec(**options), VOCAB)


class TestAppend:
    def append(self, request, token_id=7, logprobs=None):
        return request.append(token_id, SampledToken(token_id, logprobs))

    def stages(self, output):
        return [stamp.stage for stamp in output.stamps]

    @pytest.mark.parametrize(
        ("stop", "token_ids", "expected"),
        [
            ({"max_tokens": 2}, [7, 7], [RUNNING, LENGTH]),
            ({"max_tokens": 1}, [7], [LENGTH]),
            ({"stop_token_ids": [9]}, [7, 9], [RUNNING, STOP]),
            ({"max_tokens": 1, "stop_token_ids": [7]}, [7], [STOP]),
        ],
    )
    def test_finish_reasons(self, stop, token_ids, expected):
        request, _ = make_request(stop=stop)
        assert [self.append(request, token).finish_reason for token in token_ids] == expected
        assert request.output_token_ids == token_ids

    def test_output_of_earlier_attempts_counts(self):
        request, _ = make_request(token_ids=(1, 2, 3, 7, 7), stop={"max_tokens": 3})
        output = self.append(request)
        assert (output.first_index, output.finish_reason) == (2, LENGTH)

    def test_a_worker_that_computed_the_prompt(self):
        request, clock = make_request(sampling={"prompt_logprobs": True})
        request.sequence.num_cached_tokens = 1
        request.begin_chunk(1)
        request.begin_chunk(1)
        request.prompt_logprobs = [TokenLogprobs([2, 5], [-0.2, -0.5]), TokenLogprobs([3, 6], [-0.3, -0.6])]
        clock.advance(1.0)
        first = self.append(request)
        assert (first.ref.request_id, first.first_index, list(first.token_ids)) == ("r", 0, [7])
        assert (first.num_cached_tokens, first.num_chunks, first.num_computed_prompt_tokens) == (1, 2, 0)
        assert first.prompt_logprobs.num_top == 1
        assert list(first.prompt_logprobs.token_ids) == [2, 5, 3, 6]
        assert self.stages(first) == [wpb.STAGE_PREFILL_STARTED, wpb.STAGE_PREFILL_FINISHED]
        assert [stamp.age_us for stamp in first.stamps] == [1_000_000, 0]
        request.sequence.num_computed_tokens = 3
        request.begin_decode(1)
        second = self.append(request)
        assert (second.first_index, second.num_cached_tokens, second.num_chunks) == (1, 0, 0)
        assert not second.HasField("prompt_logprobs")
        assert self.stages(second) == [wpb.STAGE_DECODE_STARTED]
        last = self.append(request)
        assert (last.finish_reason, last.num_computed_prompt_tokens) == (LENGTH, 2)
        assert self.stages(last) == [wpb.STAGE_FINISHED]

    def test_a_worker_that_only_generates(self):
        """Its sequence begins with the first token from prefill, and a last prompt token whose KV it computes."""
        request, _ = make_request(token_ids=(1, 2, 3, 7), stop={"max_tokens": 2}, sampling={"prompt_logprobs": True})
        request.sequence.num_cached_tokens = request.sequence.num_computed_tokens = 2
        request.begin_decode(1)
        output = self.append(request)
        assert (output.first_index, output.num_cached_tokens, output.num_chunks) == (1, 0, 0)
        assert not output.HasField("prompt_logprobs")
        assert output.num_computed_prompt_tokens == 1
        assert self.stages(output) == [wpb.STAGE_DECODE_STARTED, wpb.STAGE_FINISHED]

    @pytest.mark.parametrize(
        ("logprobs", "expected"),
        [
            (None, None),
            (TokenLogprobs([7], [-0.5]), (0, [7])),
            (TokenLogprobs([7, 8, 9], [-0.5, -0.25, -1.0]), (2, [7, 8, 9])),
        ],
    )
    def test_logprobs(self, logprobs, expected):
        output = self.append(make_request()[0], logprobs=logprobs)
        assert output.HasField("logprobs") is (expected is not None)
        if expected is not None:
            assert (output.logprobs.num_top, list(output.logprobs.token_ids)) == expected
            assert list(output.logprobs.logprobs) == logprobs.logprobs


@pytest.mark.parametrize(("deadline_ms", "expected"), [(0, None), (1500, 1001.5)])
def test_deadlines_are_on_the_workers_clock(deadline_ms, expected):
    request, _ = make_request(deadline_ms=deadline_ms)
    assert request.deadline == expected
