"""Bad input gets INVALID_ARGUMENT with the field and the limit, before anything is queued."""

from __future__ import annotations

import math

import pytest

from protos import inference_pb2 as pb
from router.tokenizer import Tokenizer
from router.validation import ClusterLimits, check_request
from rpc.errors import InvalidArgument, NotFound, RequestError

VOCAB = 320
LIMITS = ClusterLimits(max_model_len=64, vocab_size=VOCAB, page_size=8, prefill_pages=6, decode_pages=7)
NAN = math.nan


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer(tiny_model("llama"))


def make_request(**changes):
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 10))
    for path, value in changes.items():
        target, names = request, path.split("__")
        for name in names[:-1]:
            target = getattr(target, name)
        if isinstance(value, (list, dict)):
            getattr(target, names[-1]).clear() if isinstance(value, dict) else None
            field = getattr(target, names[-1])
            field.update(value) if isinstance(value, dict) else field.extend(value)
        else:
            setattr(target, names[-1], value)
    return request


def check(request, tokenizer, limits=LIMITS):
    return check_request(request, tokenizer, "tiny", limits)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"sampling__temperature": -0.1}, "sampling.temperature", "at least 0"),
        ({"sampling__temperature": NAN}, "sampling.temperature", "finite"),
        ({"sampling__temperature": math.inf}, "sampling.temperature", "finite"),
        ({"sampling__top_p": 0.0}, "sampling.top_p", r"\(0, 1\]"),
        ({"sampling__top_p": 1.001}, "sampling.top_p", r"\(0, 1\]"),
        ({"sampling__top_p": NAN}, "sampling.top_p", r"\(0, 1\]"),
        ({"sampling__top_k": -2}, "sampling.top_k", "-1 for off"),
        ({"sampling__min_p": -0.1}, "sampling.min_p", r"\[0.0, 1.0\]"),
        ({"sampling__min_p": 1.1}, "sampling.min_p", r"\[0.0, 1.0\]"),
        ({"sampling__min_p": NAN}, "sampling.min_p", "is nan"),
        ({"sampling__repetition_penalty": 0.0}, "sampling.repetition_penalty", r"\[0.01, 10.0\]"),
        ({"sampling__repetition_penalty": -1.0}, "sampling.repetition_penalty", r"\[0.01, 10.0\]"),
        ({"sampling__repetition_penalty": NAN}, "sampling.repetition_penalty", "is nan"),
        ({"sampling__presence_penalty": 2.1}, "sampling.presence_penalty", r"\[-2.0, 2.0\]"),
        ({"sampling__frequency_penalty": NAN}, "sampling.frequency_penalty", "is nan"),
        ({"sampling__frequency_penalty": math.inf}, "sampling.frequency_penalty", "is inf"),
        ({"sampling__logit_bias": {VOCAB: -100.0}}, r"sampling.logit_bias\[320\]", r"must be in \[0, 320\)"),
        ({"sampling__logit_bias": {-1: 5.0}}, r"sampling.logit_bias\[-1\]", "is no token"),
        ({"sampling__logit_bias": {3: NAN}}, r"sampling.logit_bias\[3\]", "is nan"),
        ({"sampling__logit_bias": {3: math.inf}}, r"sampling.logit_bias\[3\]", "is inf"),
        ({"sampling__logit_bias": {3: 1e9}}, r"sampling.logit_bias\[3\]", r"\[-100.0, 100.0\]"),
        ({"sampling__logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias", "at most 1024"),
        ({"sampling__n": 33}, "sampling.n", r"\[1, 32\]"),
        ({"stop__min_tokens": 5, "stop__max_tokens": 4}, "stop.min_tokens", "at most max_tokens, 4"),
        ({"num_logprobs": 21}, "num_logprobs", r"\[0, 20\]"),
        ({"priority": 1001}, "priority", r"\[-1000, 1000\]"),
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256"),
        ({"stop__max_tokens": 0}, "stop.max_tokens", "at least 1"),
        ({"stop__max_tokens": 2**32 - 1}, "stop.max_tokens", "39 are left: .* 49 tokens .the capacity of the prefill"),
        ({"stop__stop": ["x" * 2048, "y" * 2049]}, "stop.stop", "has 4097 characters altogether; at most 4096"),
        ({"stop__stop": ["x"] * 65}, "stop.stop", "at most 64"),
        ({"stop__stop_token_ids": [3, VOCAB]}, r"stop.stop_token_ids\[1\]", "is 320"),
        ({"stop__stop_token_ids": [3] * 65}, "stop.stop_token_ids", "at most 64"),
        ({"token_ids__ids": [-1]}, r"token_ids\[10\]", r"is -1; token ids must be in \[0, 320\)"),
        ({"token_ids__ids": [VOCAB]}, r"token_ids\[10\]", "is 320"),
        ({"token_ids__ids": [2**31 - 1]}, r"token_ids\[10\]", "is 2147483647"),
        ({"token_ids__ids": [5] * 39}, "prompt", "has 49 tokens; .* at most 48 fit: .*pool: 6 pages of 8 tokens"),
        ({"token_ids__ids": [5] * 54}, "prompt", "has 64 tokens; .* at most 48 fit"),
        ({"text": ""}, "text", "is empty"),
        ({"request_id": "x" * 129}, "request_id", "at most 128"),
    ],
)  # fmt: skip
def test_each_bad_value_names_its_field_and_limit(changes, field, words, tokenizer):
    with pytest.raises(InvalidArgument, match=f"^{field}: .*{words}") as caught:
        check(make_request(**changes), tokenizer)
    detail = caught.value.details()[0]
    assert detail.field_violations[0].field == caught.value.field


@pytest.mark.parametrize(
    "prompt",
    [{}, {"token_ids": pb.TokenIds()}, {"chat": pb.ChatMessages()}, {"text": ""}],
)
def test_empty_prompts_are_refused(prompt, tokenizer):
    """Casebook C044."""
    with pytest.raises(InvalidArgument, match=r"at least 1|is missing"):
        check(pb.GenerateRequest(**prompt), tokenizer)


def test_a_message_without_a_role_is_named(tokenizer):
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x"), pb.ChatMessage(content="y")])
    with pytest.raises(InvalidArgument, match=r"chat.messages\[1\].role"):
        check(pb.GenerateRequest(chat=chat), tokenizer)


def test_another_model_is_not_found(tokenizer):
    with pytest.raises(NotFound, match="'gpt-9' is not served here; this router serves 'tiny'"):
        check(make_request(model="gpt-9"), tokenizer)


def test_defaults_are_filled_in(tokenizer):
    checked = check(make_request(), tokenizer)
    assert (checked.sampling.temperature, checked.sampling.top_p, checked.sampling.top_k) == (1.0, 1.0, 0)
    assert checked.stop.max_tokens == 6 * 8 + 1 - 10
    assert list(checked.stop.stop_token_ids) == [1]
    assert checked.request_id.startswith("req-")


def test_every_sampling_field_reaches_the_workers(tokenizer):
    """Casebook C028: the last id of the vocabulary may have a bias."""
    checked = check(
        make_request(
            sampling__min_p=0.25,
            sampling__repetition_penalty=1.5,
            sampling__presence_penalty=-2.0,
            sampling__frequency_penalty=2.0,
            sampling__logit_bias={VOCAB - 1: 5.0, 3: -100.0},
            sampling__n=4,
            num_logprobs=20,
            echo_prompt_logprobs=True,
            stop__min_tokens=3,
            stop__stop_token_ids=[9],
        ),
        tokenizer,
    )
    sampling = checked.sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 2.0)
    assert (list(sampling.bias_token_ids), list(sampling.biases)) == ([3, VOCAB - 1], [-100.0, 5.0])
    assert (sampling.num_logprobs, sampling.prompt_logprobs) == (20, True)
    assert (checked.num_completions, checked.stop.min_tokens, list(checked.stop.stop_token_ids)) == (4, 3, [1, 9])
    completions = [checked.completion(index).sampling for index in range(4)]
    assert [a.choice_index for a in completions] == [0, 1, 2, 3]
    assert [a.prompt_logprobs for a in completions] == [True, False, False, False]
    assert {a.seed for a in completions} == {sampling.seed}


def test_unset_and_zero_are_told_apart_where_it_matters(tokenizer):
    assert not check(make_request(), tokenizer).sampling.HasField("num_logprobs")
    assert check(make_request(num_logprobs=0), tokenizer).sampling.HasField("num_logprobs")
    assert check(make_request(), tokenizer).sampling.repetition_penalty == 1
    assert check(make_request(sampling__n=0), tokenizer).num_completions == 1


def test_an_answer_that_every_token_ends_can_not_have_min_tokens(tokenizer):
    limits = ClusterLimits(64, 3, 8, 100, 100)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2]))
    request.stop.stop_token_ids.extend([0, 2])
    request.stop.min_tokens = 1
    with pytest.raises(InvalidArgument, match=r"stop.min_tokens: is 1, but every token ends the output"):
        check(request, tokenizer, limits)


def test_seeds_are_drawn_differently_if_unset_and_kept_if_set(tokenizer):
    """Casebook C034."""
    assert len({check(make_request(), tokenizer).sampling.seed for _ in range(20)}) == 20
    assert check(make_request(sampling__seed=0), tokenizer).sampling.seed == 0
    assert check(make_request(sampling__seed=2**64 - 1), tokenizer).sampling.seed == 2**64 - 1


def test_ignore_eos_leaves_the_clients_stop_ids(tokenizer):
    """Casebook C016."""
    checked = check(make_request(stop__ignore_eos=True, stop__stop_token_ids=[9]), tokenizer)
    assert list(checked.stop.stop_token_ids) == [9]


@pytest.mark.parametrize(("length", "most"), [(1, 63), (62, 2), (63, 1)])
def test_prompt_and_answer_fill_the_models_limit_exactly(length, most, tokenizer):
    """Casebook C045, C055."""
    limits = ClusterLimits(64, VOCAB, 8, 100, 100)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * length))
    assert check(request, tokenizer, limits).stop.max_tokens == most
    request.stop.max_tokens = most
    check(request, tokenizer, limits)
    request.stop.max_tokens = most + 1
    with pytest.raises(
        InvalidArgument, match=f"at most {most} are left: this model's maximum context length is 64 tokens$"
    ):
        check(request, tokenizer, limits)


def test_logprobs_of_a_long_prompt_are_refused_with_their_number(tokenizer):
    limits = ClusterLimits(10_000, VOCAB, 8, 10_000, 10_000)
    request = make_request(num_logprobs=20, echo_prompt_logprobs=True)
    request.token_ids.ids.extend([5] * 4000)
    with pytest.raises(InvalidArgument, match=r"echo_prompt_logprobs: makes 84210 values .* at most 65536"):
        check(request, tokenizer, limits)


def test_ending_tokens_that_the_model_does_not_have_are_left_out(tokenizer):
    limits = ClusterLimits(64, 1, 8, 100, 100)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0]))
    assert list(check(request, tokenizer, limits).stop.stop_token_ids) == []


def test_a_top_k_of_the_whole_vocabulary_is_off(tokenizer):
    """Casebook C025."""
    sizes = {0: 0, -1: 0, 1: 1, VOCAB - 1: VOCAB - 1, VOCAB: 0, VOCAB + 1: 0, 9_999_999: 0}
    for asked, got in sizes.items():
        assert check(make_request(sampling__top_k=asked), tokenizer).sampling.top_k == got


def test_bounds_are_those_that_a_client_can_write(tokenizer):
    """0.01 as a 32-bit float is a little less than 0.01."""
    assert check(make_request(sampling__repetition_penalty=0.01), tokenizer).sampling.repetition_penalty < 0.01
    with pytest.raises(InvalidArgument, match=r"is 0\.0099; it must be in \[0\.01, 10\.0\]"):
        check(make_request(sampling__repetition_penalty=0.0099), tokenizer)


def test_empty_stop_strings_say_nothing(tokenizer):
    assert check(make_request(stop__stop=["", "a", ""]), tokenizer).stop_strings == ("a",)


def test_what_can_really_be_had_is_the_smaller_of_model_and_pools():
    assert ClusterLimits(64, VOCAB, 8, 100, 100).longest_sequence == 64
    assert ClusterLimits(64, VOCAB, 8, 6, 100).longest_sequence == 49
    assert ClusterLimits(64, VOCAB, 8, 100, 5).longest_sequence == 41


@pytest.mark.parametrize("prompt", [{"text": "ab" * 500_000}, {"chat": "ab" * 500_000}, {"token_ids": [5] * 500_000}])
def test_a_prompt_that_is_far_too_long_is_not_read_to_its_end(prompt, tokenizer, monkeypatch):
    """Tokenizing costs some hundred bytes of memory for each byte of text."""
    tokenized = []
    inner = tokenizer._tokenizer

    class Watched:
        def __call__(self, text, **options):
            tokenized.append(len(text))
            return inner(text, **options)

        def __getattr__(self, name):
            return getattr(inner, name)

    [(kind, value)] = prompt.items()
    request = pb.GenerateRequest()
    if kind == "text":
        request.text = value
    elif kind == "chat":
        request.chat.messages.add(role="user", content=value)
    else:
        request.token_ids.ids.extend(value)
    monkeypatch.setattr(tokenizer, "_tokenizer", Watched())
    monkeypatch.setattr(tokenizer, "longest_token", 10**6)  # as if the vocabulary did not help
    with pytest.raises(InvalidArgument, match=r"tokens; with at least 1 output token, at most 48 fit") as error:
        check(request, tokenizer)
    assert error.value.reason == "context_length_exceeded"
    assert sum(tokenized) < 1000
    monkeypatch.setattr(tokenizer, "longest_token", 8)
    tokenized.clear()
    with pytest.raises(InvalidArgument, match=r"at most 48 fit"):
        check(request, tokenizer)
    assert not tokenized


def test_a_text_that_fits_is_never_taken_for_too_long(tokenizer):
    """At the limit, by every way in which lengths are looked at."""
    assert len(check(pb.GenerateRequest(text="a" * 48), tokenizer).prompt_token_ids) == 48
    with pytest.raises(InvalidArgument, match="has 49 tokens"):
        check(pb.GenerateRequest(text="a" * 49), tokenizer)


@pytest.mark.parametrize(
    "changes", [{"model": "x" * 100_000}, {"request_id": "y" * 100_000}, {"cache_salt": "z" * 100_000}]
)
def test_errors_quote_at_most_a_little(changes, tokenizer):
    """gRPC turns an error whose trailers are too large into another one, with a status of its own."""
    with pytest.raises(RequestError) as error:
        check(make_request(**changes), tokenizer)
    assert len(error.value.message) < 400


def test_what_a_template_says_is_quoted_in_part(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", "{{ raise_exception(messages[0].content) }}")
    request = pb.GenerateRequest()
    request.chat.messages.add(role="user", content="long " * 8)
    request.chat.messages.add(role="user", content="x")
    with pytest.raises(InvalidArgument, match="the model's chat template rejects this conversation: long") as error:
        check(request, tokenizer)
    assert len(error.value.message) < 400


def test_a_developer_is_the_system_where_the_template_knows_no_developer(tokenizer, monkeypatch):
    def prompt(role):
        return check(pb.GenerateRequest(chat=pb.ChatMessages(messages=[{"role": role, "content": "x"}])), tokenizer)

    assert prompt("developer").prompt_token_ids == prompt("system").prompt_token_ids
    template = "{% for m in messages %}{{ 'D' if m.role == 'developer' else 'S' }}{{ m.name }}{% endfor %}"
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", template)
    assert prompt("developer").prompt_token_ids == tuple(tokenizer.encode("D"))
    named = pb.ChatMessages(messages=[{"role": "system", "content": "x", "name": "Bo"}])
    assert check(pb.GenerateRequest(chat=named), tokenizer).prompt_token_ids == tuple(tokenizer.encode("SBo"))


def test_a_token_that_only_the_tokenizer_knows_is_refused(tokenizer):
    """It would be an index beyond the embedding."""
    limits = ClusterLimits(64, 100, 8, 100, 100)
    with pytest.raises(InvalidArgument, match=r"text: has the token \d+, but the model has only 100 tokens"):
        check(pb.GenerateRequest(text="\xe9"), tokenizer, limits)
