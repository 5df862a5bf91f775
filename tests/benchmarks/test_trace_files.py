"""Traces as they are published: read, or refused with file, line and field."""

from __future__ import annotations

import json

import pytest

from benchmarks.arrivals import scaled_to_rate
from benchmarks.loads import SLICES
from benchmarks.trace_files import read_csv, read_mooncake, read_sharegpt


def lengths(requests):
    return [(len(r.prompt), r.max_tokens) for r in requests]


def write(tmp_path, content):
    path = tmp_path / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_traces_keep_their_times_and_lengths():
    azure = read_csv(SLICES["azure"], 5, 0)
    assert lengths(azure) == [(374, 44), (396, 109), (879, 55), (91, 16), (91, 16)]
    assert [r.arrival for r in azure][:2] == [0.0, pytest.approx(4.31459, abs=1e-4)]
    assert list(scaled_to_rate([r.arrival for r in azure], 2.0))[1] == pytest.approx(4.31459 / 2, abs=1e-4)


def test_equal_hash_ids_are_equal_blocks_and_others_are_not():
    rows = [json.loads(line) for line in SLICES["mooncake"].read_text().splitlines()[:20]]
    requests = read_mooncake(SLICES["mooncake"], 20, 0)
    assert [len(r.prompt) for r in requests] == [row["input_length"] for row in rows]
    assert requests[0].prompt[:512] == requests[1].prompt[:512]
    assert requests[0].prompt[512:1024] != requests[1].prompt[512:1024]
    assert [r.arrival for r in requests] == [row["timestamp"] / 1e3 for row in rows]


@pytest.mark.parametrize(
    "content",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,3,4\n2023-11-16 18:15:47.6805900,5,6\n",
        b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,3.0,4.0\r\n\r\n"
        b"2023-11-16 18:15:47.6805900,5,6\r\n\r\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,3,4,7,x\n6,GPT-4,5,6,11,y\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16T20:15:47+02:00,5,6\n2023-11-16T18:15:46Z,3,4\n",
        "GeneratedTokens, TIMESTAMP ,ContextTokens\n6,2023-11-16T18:15:47,5\n4,2023-11-16T18:15:46+00:00,3\n",
    ],
    ids=["plain", "bom crlf blank decimals", "burstgpt", "zones unsorted", "other order, with and without a zone"],
)  # fmt: skip
def test_tables_in_the_forms_that_are_published(content, tmp_path):
    requests = read_csv(write(tmp_path, content), 10, 0)
    assert lengths(requests) == [(3, 4), (5, 6)]
    assert [r.arrival for r in requests] == [0.0, pytest.approx(1.0, abs=1e-5)]


def test_mooncake_without_hash_ids_and_with_gaps(tmp_path):
    content = '{"timestamp": 2000.5, "input_length": 3.0, "output_length": 0}\r\n\n{"timestamp": 0, "input_length": 700, "output_length": 2, "hash_ids": ["a", "b"]}'  # noqa: E501
    requests = read_mooncake(write(tmp_path, content), 10, 0)
    assert lengths(requests) == [(700, 2), (3, 1)]
    assert [r.arrival for r in requests] == [0.0, 2.0005]


TALK = [{"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y" * 80}]


@pytest.mark.parametrize("form", ["lines", "array", "lines with U+2028"])
def test_sharegpt_as_lines_and_as_an_array(form, tmp_path):
    rows = [
        {"conversations": TALK},
        {"conversations": TALK[:1]},
        {"conversations": [{"from": "system", "value": "z" * 40}, *TALK]},
        {"conversations": [TALK[1], *TALK]},
        {"messages": [{"role": "user", "content": "x\u2028" * 200}, {"role": "assistant", "content": "y" * 80}]},
    ]
    if form == "array":
        content = json.dumps(rows)
    else:
        content = "\n".join(json.dumps(row, ensure_ascii="U" not in form) for row in rows)
    requests = read_sharegpt(write(tmp_path, content), 10, 0)
    assert lengths(requests) == [(100, 20), (110, 20), (120, 20), (100, 20)]


@pytest.mark.parametrize(
    ("read", "content", "words"),
    [
        (read_csv, "a,b\n1,2\n", "line 1: no column of TIMESTAMP"),
        (read_csv, "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n2,many,3\n", "line 3, field ContextTokens: 'many'"),
        (read_csv, "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,2,3\n", "line 2, field TIMESTAMP: 'soon' is no time"),
        (read_csv, "TIMESTAMP,ContextTokens,GeneratedTokens\n1,-2,3\n", "field ContextTokens: '-2' is no length"),
        (read_csv, "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "field GeneratedTokens: None is no length"),
        (read_csv, "TIMESTAMP,ContextTokens,GeneratedTokens\nnan,2,3\n", "field TIMESTAMP: 'nan' is no time"),
        (read_csv, "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (read_mooncake, '{"timestamp": 1}\n', "line 1, field input_length: None is no length"),
        (read_mooncake, '{"timestamp": 1, "input_length": 2, "output_length": 1}\n{', "line 2: is no JSON"),
        (read_mooncake, "[1]", "entry 1: is no JSON object"),
        (read_sharegpt, "[{]", "is no JSON array"),
        (read_sharegpt, '{"conversations": 5}', "field conversations: must be a list"),
        (read_sharegpt, json.dumps({"conversations": TALK[:1]}), "no conversation with a question and an answer"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_file_line_and_field(read, content, words, tmp_path):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=words) as error:
        read(path, 10, 0)
    assert str(path) in str(error.value)
