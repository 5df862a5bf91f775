"""From workers' tokens to a client's responses, with a scripted model: text, stops, several answers."""

from __future__ import annotations

import asyncio

import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.generation import Generator
from router.tokenizer import Tokenizer
from rpc.errors import RequestError, ResourceExhausted
from tests.router.rig import Rig

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    """Single bytes as tokens."""
    return Tokenizer(tiny_model("llama"))


class ScriptedWorkers:
    """Serves every request with a script: for each answer its tokens, one per step. The last one ends it."""

    def __init__(self, tokenizer, *scripts, finish=pb.FINISH_REASON_STOP, merge=1):
        self.rig = Rig()
        for link in self.rig.prefill + self.rig.decode:
            link.info.limits.vocab_size = 320
        self.scripts, self.finish, self.merge = scripts, finish, merge
        self.generator = Generator(self.rig.dispatcher, tokenizer, "tiny", self.rig.metrics)
        self.reserved, self.aborted = [], []
        self._progress = {}

    def turn(self):
        """Answers commands, then one step of every running request."""
        [p], [d] = self.rig.prefill, self.rig.decode
        for command in (command for link in (d, p) for command in self.rig.sent(link)):
            kind = command.WhichOneof("command")
            if kind == "abort":
                self.aborted.append(command.abort.ref.request_id)
                self._progress.pop(command.abort.ref.request_id, None)
            elif kind == "reserve":
                self.reserved.append(command.reserve)
                self.rig.event(d, reserved=wpb.ReservedEvent(ref=command.reserve.ref))
            elif kind == "prefill":
                self._progress[command.prefill.ref.request_id] = [command.prefill, 0]
        for wire_id, (command, index) in list(self._progress.items()):
            script = self.scripts[command.spec.sampling.choice_index % len(self.scripts)]
            new = script[index : index + (self.merge if index else 1)]
            is_last = index + len(new) == len(script)
            output = wpb.TokenOutput(
                ref=command.ref, first_index=index, token_ids=new,
                finish_reason=self.finish if is_last else pb.FINISH_REASON_UNSPECIFIED,
            )  # fmt: skip
            if command.spec.sampling.HasField("num_logprobs"):
                output.logprobs.num_top = 1
                output.logprobs.token_ids.extend(t for token in new for t in (token, 5))
                output.logprobs.logprobs.extend(-0.5 for _ in range(2 * len(new)))
            if command.spec.sampling.prompt_logprobs and index == 0:
                output.prompt_logprobs.token_ids.extend(command.spec.token_ids[1:])
                output.prompt_logprobs.logprobs.extend(-1.0 for _ in command.spec.token_ids[1:])
            self._progress[wire_id][1] += len(new)
            if is_last:
                del self._progress[wire_id]
            self.rig.event(p if index == 0 else d, step_output=wpb.StepOutput(outputs=[output]))
            if index == 0:
                finished = wpb.TransferFinishedEvent(ref=command.ref)
                self.rig.event(p, transfer_finished=finished)

    async def responses(self, **fields):
        """All responses to a request, as they come step by step."""
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[40, 41, 42]))
        request.MergeFrom(pb.GenerateRequest(**fields))

        async def keep_turning():
            while True:
                self.turn()
                for _ in range(5):
                    await asyncio.sleep(0)

        turning = asyncio.create_task(keep_turning())
        try:
            return [response async for response in self.generator.generate(request, None)]
        finally:
            turning.cancel()
            self.turn()


def text_of(responses, index=0):
    return "".join(r.text for r in responses if r.index == index)


def check_counts(responses, index=0):
    """Casebook C021: ids, log-probabilities and usage agree."""
    of_index = [r for r in responses if r.index == index]
    ids = [token for r in of_index for token in r.token_ids]
    logprobs = [entry for r in of_index for entry in r.logprobs]
    assert len(ids) == len(logprobs) == of_index[-1].usage.completion_tokens
    assert [entry.chosen.token_id for entry in logprobs] == ids
    return ids


TEXTS = [
    "Repeat exactly: 😀👋🏽 ď ábelské 한국어 中文",
    "e\u0301 combining, \u200d joined 👨‍👩‍👧‍👦",
    "plain",
    "a\ufffd",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("merge", [1, 3, 100])
async def test_text_streams_token_by_token_without_half_characters(text, merge, tokenizer):
    """Casebook C002, C006, C011: bytes as tokens; each piece comes with the token that completes it."""
    script = [*tokenizer.encode(text), EOS]
    workers = ScriptedWorkers(tokenizer, script, merge=merge)
    responses = await workers.responses(return_token_ids=True)
    assert text_of(responses) == text == tokenizer.decode(script)
    if "\ufffd" not in text:
        assert not any("\ufffd" in r.text for r in responses)
    if merge == 1:
        ends = {len(text[: n + 1].encode()) for n in range(len(text))}
        assert [n + 1 for n, r in enumerate(responses) if r.text] == sorted(ends)
    assert (responses[-1].finish_reason, responses[-1].stop_reason) == (pb.FINISH_REASON_STOP, "")
    assert responses[-1].usage.completion_tokens == len(script)


async def test_an_answer_cut_inside_a_character_keeps_its_tail(tokenizer):
    """Casebook C005."""
    script = tokenizer.encode("😀")[:1]
    responses = await ScriptedWorkers(tokenizer, script, finish=pb.FINISH_REASON_LENGTH).responses()
    assert text_of(responses) == "\ufffd"
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("merge", [1, 4, 100])
@pytest.mark.parametrize(
    ("stop", "include", "shown"),
    [
        (["world"], False, "hello "),
        (["world"], True, "hello world"),
        (["lo w", "world"], False, "hel"),
        (["o", "hello"], False, ""),
        (["o", "hello w"], False, "hell"),
        (["é"], False, "hello world, caf"),
        (["nowhere", "café!"], False, "hello world, café"),
    ],
)
async def test_stops_are_cut_exactly_whatever_comes_together(stop, include, shown, merge, tokenizer):
    """Casebook C012, C013, C021, C022: nothing leaks, and the worker is told at once."""
    script = [*tokenizer.encode("hello world, café"), EOS]
    workers = ScriptedWorkers(tokenizer, script, merge=merge)
    responses = await workers.responses(
        stop=pb.StopConditions(stop=stop, include_stop=include), return_token_ids=True, num_logprobs=1
    )
    assert text_of(responses) == shown
    assert not any(any(s in text_of(responses[:n]) for s in stop) for n in range(len(responses))) or include
    ids = check_counts(responses)
    last = responses[-1]
    if last.stop_reason:
        full = (shown if include else shown + last.stop_reason).encode()
        assert tokenizer.decode(ids).encode() == full
        assert workers.rig.dispatcher.num_running == 0
        if merge == 1:  # else the worker may have ended by itself
            assert workers.aborted
    else:
        assert ids == script


async def test_a_stop_string_before_min_tokens_does_not_count_and_is_kept(tokenizer):
    """Casebook C017: matches that are complete before min_tokens stay in the text."""
    script = [*tokenizer.encode("abcabcabc"), EOS]
    for min_tokens, shown in ((0, "ab"), (2, "ab"), (3, "ab"), (4, "abcab"), (6, "abcab"), (7, "abcabcab")):
        workers = ScriptedWorkers(tokenizer, script)
        stop = pb.StopConditions(stop=["c"], min_tokens=min_tokens)
        responses = await workers.responses(stop=stop)
        assert text_of(responses) == shown, min_tokens
        assert responses[-1].usage.completion_tokens == max(min_tokens, len(shown) + 1)
    stop = pb.StopConditions(stop=["bca"], min_tokens=3)
    assert text_of(await ScriptedWorkers(tokenizer, script).responses(stop=stop)) == "a", "begun before, ended behind"


async def test_the_ending_token_shows_only_if_it_is_asked_for(tokenizer):
    """Casebook C008."""
    script = [*tokenizer.encode("hi"), EOS]
    for include_stop, special, shown in ((False, False, "hi"), (True, False, "hi"), (True, True, "hi</s>")):
        workers = ScriptedWorkers(tokenizer, script)
        responses = await workers.responses(
            stop=pb.StopConditions(include_stop=include_stop), include_special_tokens=special
        )
        assert text_of(responses) == shown
    inner = [*tokenizer.encode("a"), 0, *tokenizer.encode("b"), EOS]
    assert text_of(await ScriptedWorkers(tokenizer, inner).responses()) == "ab"
    shown = text_of(await ScriptedWorkers(tokenizer, inner).responses(include_special_tokens=True))
    assert shown == "a<s>b"


async def test_a_stop_token_is_told_by_its_id_and_can_be_shown(tokenizer):
    stop_id = tokenizer.encode("!")[0]
    script = [*tokenizer.encode("hi"), stop_id]
    for include, shown in ((False, "hi"), (True, "hi!")):
        stop = pb.StopConditions(stop_token_ids=[stop_id], include_stop=include)
        responses = await ScriptedWorkers(tokenizer, script).responses(stop=stop)
        assert (text_of(responses), responses[-1].stop_reason) == (shown, str(stop_id))


async def test_several_answers_end_each_for_itself(tokenizer):
    scripts = [[*tokenizer.encode(text), EOS] for text in ("first 😀", "b", "the third of them")]
    workers = ScriptedWorkers(tokenizer, *scripts)
    responses = await workers.responses(
        sampling=pb.SamplingParams(n=3, seed=9), return_token_ids=True, num_logprobs=1, echo_prompt_logprobs=True
    )
    assert [text_of(responses, index) for index in range(3)] == ["first 😀", "b", "the third of them"]
    assert [check_counts(responses, index) for index in range(3)] == scripts
    assert [r.spec.sampling.choice_index for r in workers.reserved] == [0, 1, 2]
    assert {r.spec.sampling.seed for r in workers.reserved} == {9}
    assert [r.spec.sampling.prompt_logprobs for r in workers.reserved] == [True, False, False]
    lasts = [r for r in responses if r.finish_reason]
    assert sorted(r.index for r in lasts) == [0, 1, 2]
    assert {r.usage.prompt_tokens for r in lasts} == {3}


async def test_the_other_answers_wait_until_the_first_has_the_prompt_computed(tokenizer):
    script = [*tokenizer.encode("xyz"), EOS]
    workers = ScriptedWorkers(tokenizer, script)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[40]), sampling=pb.SamplingParams(n=2))
    stream = workers.generator.generate(request, None)
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert len(workers.rig.dispatcher._running) == 1
    workers.turn()
    await first
    assert workers.rig.dispatcher.room.num_announced == 1
    second = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert len(workers.rig.dispatcher._running) == 1, "it has the first token, but decode has no pages yet"
    workers.turn()
    await second
    third = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert len(workers.rig.dispatcher._running) == 2
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    await stream.aclose()
    assert workers.rig.dispatcher.num_running == 0
    assert workers.rig.dispatcher.room.num_announced == 0
    workers.turn()
    assert len(workers.aborted) >= 2, "both answers are cancelled on the workers"


async def test_a_queue_without_room_for_all_answers_takes_none(tokenizer):
    workers = ScriptedWorkers(tokenizer, [EOS])
    workers.rig.decode[0].is_full = True
    for _ in range(1022):
        workers.rig.submit()
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[40]), sampling=pb.SamplingParams(n=3))
    with pytest.raises(ResourceExhausted, match="1022 requests wait, 1024 may"):
        await anext(workers.generator.generate(request, None))
    assert workers.rig.dispatcher.num_queued == 1022


async def test_logprobs_of_the_prompt_come_first_and_once(tokenizer):
    """Casebook C027, C010: each entry has its bytes, so parts of characters can be told apart."""
    script = [*tokenizer.encode("😀"), EOS]
    responses = await ScriptedWorkers(tokenizer, script).responses(echo_prompt_logprobs=True, num_logprobs=1)
    assert len(responses[0].prompt_logprobs) == 2
    assert sum(len(r.prompt_logprobs) for r in responses) == 2
    assert [p.chosen.token_id for p in responses[0].prompt_logprobs] == [41, 42]
    chosen = [entry.chosen.token_bytes for r in responses for entry in r.logprobs]
    assert b"".join(chosen[:4]).decode() == "😀"
    assert len(set(chosen)) == len(chosen)
    assert all(len(entry.top) == 1 for r in responses for entry in r.logprobs)


async def test_an_error_ends_all_answers(tokenizer):
    workers = ScriptedWorkers(tokenizer, [40] * 50)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[40]), sampling=pb.SamplingParams(n=2))
    stream = workers.generator.generate(request, None)
    pending = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    workers.turn()
    await pending
    pending = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    workers.turn()
    [reserve, *_] = workers.reserved
    ended = wpb.RequestEndedEvent(
        ref=reserve.ref, cause=wpb.CAUSE_NOT_FINITE, message="the model's logits are not finite"
    )
    workers.rig.event(workers.rig.decode[0], request_ended=ended)

    async def read_to_the_end():
        await pending
        async for _ in stream:
            pass

    with pytest.raises(RequestError, match="not finite"):
        await read_to_the_end()
    assert workers.rig.dispatcher.num_running == 0


async def test_a_hidden_special_token_may_be_a_stop_string(tokenizer):
    workers = ScriptedWorkers(tokenizer, [50, 51, 0, 52, 53])  # 0 is <s>, which answers hide
    stop = pb.StopConditions(max_tokens=8, stop=["<s>"])
    responses = await workers.responses(stop=stop)
    last = responses[-1]
    assert "".join(r.text for r in responses) == tokenizer.decode([50, 51])
    assert (last.finish_reason, last.stop_reason, last.usage.completion_tokens) == (pb.FINISH_REASON_STOP, "<s>", 3)
    assert workers.aborted
    stop.include_stop = True
    responses = await ScriptedWorkers(tokenizer, [50, 51, 0, 52, 53]).responses(stop=stop)
    assert "".join(r.text for r in responses) == tokenizer.decode([50, 51]) + "<s>"


@pytest.mark.parametrize("ending", [{}, {"stop": pb.StopConditions(max_tokens=8, stop=["Q"])}])
async def test_the_last_message_has_the_last_text_and_the_reason(tokenizer, ending):
    """One more message without text would count as one more token to load tools."""
    [a, b, c] = tokenizer.encode("abc")
    end = tokenizer.encode("Q") if ending else []
    script = [a, b, c, *end, *([60] if ending else [])]
    workers = ScriptedWorkers(tokenizer, script, finish=pb.FINISH_REASON_LENGTH)
    responses = await workers.responses(**ending)
    assert [r.text for r in responses] == (["a", "b", "c", ""] if ending else ["a", "b", "c"])
    assert [bool(r.finish_reason) for r in responses] == [False] * (len(responses) - 1) + [True]
