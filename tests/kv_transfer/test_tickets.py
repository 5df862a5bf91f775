"""Tickets count; they trust neither order nor repetition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.request_ref import RequestRef
from kv_transfer.tickets import IncomingTicket, OutgoingTicket
from protos import kv_pb2

REF = RequestRef("r", 1)


def make_ticket(num_pages=5, first_page_index=0):
    ticket = kv_pb2.PageTicket(ref=REF.to_proto(), agent_name="owner", first_page_index=first_page_index)
    ticket.page_ids.extend(range(10, 10 + num_pages))
    return OutgoingTicket(ticket), IncomingTicket(REF, list(ticket.page_ids), "writer")


def parse(write):
    return kv_pb2.KvNotification.FromString(write.payload)


def test_pages_are_sent_once_as_they_are_finished():
    out, _ = make_ticket(5)
    assert (w := out.next_write(2)) is not None
    assert (w.first_page, w.num_pages) == (0, 2)
    assert out.next_write(2) is None
    assert (w := out.next_write(5, first_token=42)) is not None
    assert (w.first_page, w.num_pages) == (2, 3)
    assert not out.is_terminal
    out.write_ended()
    out.write_ended()
    assert out.is_terminal


def test_pages_the_owner_has_already_are_not_sent():
    out, _ = make_ticket(3, first_page_index=4)
    assert out.next_write(4) is None
    assert (w := out.next_write(6)) is not None
    assert (w.first_page, w.num_pages) == (0, 2)


def test_nothing_starts_on_a_stopped_ticket_and_open_writes_are_waited_for():
    out, _ = make_ticket(5)
    out.next_write(2)
    out.stop()
    assert out.next_write(5) is None
    assert not out.is_terminal
    out.write_ended()
    assert out.is_terminal


def test_a_failed_write_is_remembered():
    out, incoming = make_ticket(5)
    out.next_write(2)
    out.write_ended(ok=False)
    out.stop()
    assert out.is_terminal
    assert out.has_failed_write
    assert incoming.accept(kv_pb2.KvNotification.FromString(out.closed_message("why", ended_with_first_token=True)))
    assert incoming.ended_with_first_token


def test_a_ticket_without_pages_still_brings_the_first_token():
    out, incoming = make_ticket(0)
    assert not incoming.is_complete
    assert not out.is_terminal, "the first token is still to be sent"
    assert (w := out.next_write(0, first_token=3)) is not None
    assert incoming.accept(parse(w))
    assert incoming.is_complete
    assert incoming.first_token == 3


def test_all_pages_without_the_first_token_are_not_enough():
    _, incoming = make_ticket(2)
    assert incoming.accept(kv_pb2.KvNotification(first_page=0, num_pages=2))
    assert not incoming.is_complete
    assert not incoming.is_terminal


def test_duplicates_out_of_range_and_late_messages_are_ignored():
    _, incoming = make_ticket(3)
    assert incoming.accept(kv_pb2.KvNotification(first_page=0, num_pages=2))
    assert not incoming.accept(kv_pb2.KvNotification(first_page=0, num_pages=2))
    assert not incoming.accept(kv_pb2.KvNotification(first_page=2, num_pages=2))
    assert incoming.accept(kv_pb2.KvNotification(closed=True, close_reason="why"))
    assert incoming.is_terminal
    assert not incoming.is_complete
    assert incoming.close_reason == "why"
    assert not incoming.accept(kv_pb2.KvNotification(first_page=2, num_pages=1))


@given(st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=9), st.randoms())
def test_any_order_with_duplicates_completes_exactly_at_the_last_page(num_pages, chunks, rng):
    out, incoming = make_ticket(num_pages)
    messages, done = [], 0
    for chunk in chunks:
        done += chunk
        last = done >= num_pages
        if (write := out.next_write(done, first_token=5 if last else None)) is not None:
            messages.append(parse(write))
        if last:
            break
    else:
        messages.append(parse(out.next_write(num_pages, first_token=5)))
    rng.shuffle(messages)
    for index, message in enumerate(messages):
        assert not incoming.is_complete
        assert incoming.accept(message)
        if index + 1 < len(messages):
            assert not incoming.accept(message)
    assert incoming.is_complete
