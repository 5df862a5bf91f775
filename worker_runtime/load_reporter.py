"""What a worker tells all of its routers: how busy it is, and which pages its prefix cache has.

Sent when something changed; a router that connects later gets the whole state.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from engine.prefix_cache import PrefixCache
from protos import worker_pb2


class EventSink(Protocol):
    """Where events for routers go; see `worker_runtime.session.Sessions`."""

    def all_ids(self) -> list[int]:
        """Ids of the open sessions."""
        ...

    def add(self, session_id: int, event: worker_pb2.SessionResponse) -> None:
        """The event goes out with the next flush."""
        ...


class LoadReporter:
    """Lives on the engine thread."""

    def __init__(self, sessions: EventSink, cache: PrefixCache) -> None:
        self._sessions, self._cache = sessions, cache
        self._last_load: worker_pb2.LoadReport | None = None
        self._num_received: Counter[int] = Counter()
        """Prompts by session."""
        self._num_reported: Counter[int] = Counter()
        self._num_prompt_tokens = self._num_hit_tokens = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache had, since the start."""
        return self._num_hit_tokens / self._num_prompt_tokens if self._num_prompt_tokens else 0.0

    def prompt_begun(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A prompt was looked up in the prefix cache."""
        self._num_prompt_tokens += num_tokens
        self._num_hit_tokens += num_cached_tokens

    def prompt_received(self, session_id: int) -> None:
        """A router sent a prompt: from the next report on it is in the numbers."""
        self._num_received[session_id] += 1

    def session_closed(self, session_id: int) -> None:
        """A router is gone."""
        self._num_received.pop(session_id, None)

    def tell_newcomer(self, session_id: int) -> None:
        """A router connected: it gets the load with the next report, and all keys of the cache now."""
        self._last_load = None
        message = worker_pb2.CacheEvents(added=self._cache.keys())
        self._sessions.add(session_id, worker_pb2.SessionResponse(cache=message))

    def report(self, load: worker_pb2.LoadReport) -> None:
        """Tells every router what changed."""
        if load != self._last_load or self._num_received != self._num_reported:
            self._last_load, self._num_reported = load, Counter(self._num_received)
            for session_id in self._sessions.all_ids():
                event = worker_pb2.SessionResponse(load=load)
                event.load.num_prompts_received = self._num_received[session_id]
                self._sessions.add(session_id, event)
        if events := self._cache.take_events():
            message = worker_pb2.CacheEvents(added=events.added, evicted=events.evicted)
            for session_id in self._sessions.all_ids():
                self._sessions.add(session_id, worker_pb2.SessionResponse(cache=message))
