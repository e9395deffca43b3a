"""Reads streamed answers with raw sockets and epoll, and records when each piece of data arrived.

Parsing happens afterwards, so the work per token is small enough to disturb neither the measured system nor the clock.
"""

import json
import re
import select
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import urlsplit

from bench.clients.wrk import REPLY_S_MAX, post

RECEIVE_BYTES = 65_536
QUIET_S_MAX = 15.0
"""If no stream receives anything for this long, all are given up."""
_EVENT = re.compile(rb"^data: (\{.*\})\r?$", re.MULTILINE)


@dataclass(frozen=True)
class Event:
    """One server-sent event. `at`: arrival of its last byte, by `time.perf_counter`."""

    at: float
    content: Any

    @property
    def text(self) -> str:
        """The text of the event; empty if it has no text or no choice."""
        return "".join(choice.get("text") or "" for choice in self.content.get("choices") or ())


@dataclass
class Answer:
    """One answer as it arrived. `pieces`: arrival times and bytes. `over_at`: when it ended or was given up."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    over_at: float = 0.0

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    @property
    def events(self) -> list[Event]:
        """All events except the last, `[DONE]`. Relies on servers that do not split an event over HTTP chunks."""
        ends = list(accumulate(len(data) for _, data in self.pieces))
        return [
            Event(self.pieces[bisect_left(ends, found.end(1))][0], json.loads(found[1]))
            for found in _EVENT.finditer(self.raw)
        ]

    @property
    def is_complete(self) -> bool:
        """Whether the answer ends with `[DONE]` and contains no error."""
        return b"\ndata: [DONE]" in self.raw and not any("error" in event.content for event in self.events)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def usage(self) -> tuple[int, int] | None:
        """Tokens of the prompt and of the answer; None if the answer does not report them."""
        for event in reversed(self.events):
            if used := event.content.get("usage"):
                return used["prompt_tokens"], used["completion_tokens"]
        return None

    @property
    def token_times(self) -> list[float]:
        """Arrival times of the events with text."""
        return [event.at for event in self.events if event.text]

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between two events with text."""
        return [after - before for before, after in pairwise(self.token_times)]

    def longest_gap_s(self, since: float) -> float:
        """The longest gap that ended after `since`. For an incomplete answer, the final wait counts as a gap."""
        times = self.token_times
        ends = times if self.is_complete else [*times, self.over_at]
        return max((after - before for before, after in pairwise(ends) if after > since), default=0.0)


@dataclass(frozen=True)
class Disturbance:
    """An action to take `after_s` seconds after all requests were sent."""

    after_s: float
    act: Callable[[], None]


def read_answers(
    url: str, bodies: Sequence[bytes], disturbance: Disturbance | None = None, headers: str = ""
) -> list[Answer]:
    """Send all requests at once, each on its own connection; return when all have ended or were given up.

    `headers`: further lines of each request's head.
    """
    place = urlsplit(url)
    answers = [Answer() for _ in bodies]
    under_way: dict[int, tuple[socket.socket, Answer]] = {}
    with select.epoll() as epoll:
        for body, answer in zip(bodies, answers, strict=True):
            sock = socket.create_connection((place.hostname, place.port), timeout=REPLY_S_MAX)
            sock.sendall(post(place.netloc, body, headers))
            sock.setblocking(False)
            under_way[sock.fileno()] = (sock, answer)
            epoll.register(sock, select.EPOLLIN)
        _read(epoll, under_way, disturbance)
    for sock, answer in under_way.values():
        sock.close()
        answer.over_at = time.perf_counter()
    return answers


def _read(
    epoll: select.epoll, under_way: dict[int, tuple[socket.socket, Answer]], disturbance: Disturbance | None
) -> None:
    """Read until every stream has ended or was given up; removes those that have ended."""
    last_at = began = time.perf_counter()
    while under_way and last_at + QUIET_S_MAX > (now := time.perf_counter()):
        if disturbance is not None and now >= began + disturbance.after_s:
            disturbance.act()
            disturbance = None
        wake_at = last_at + QUIET_S_MAX if disturbance is None else began + disturbance.after_s
        for fd, _ in epoll.poll(max(0.0, wake_at - now)):
            sock, answer = under_way[fd]
            if data := _received(sock):
                last_at = time.perf_counter()
                answer.pieces.append((last_at, data))
            else:
                answer.over_at = time.perf_counter()
                epoll.unregister(fd)
                sock.close()
                del under_way[fd]


def _received(sock: socket.socket) -> bytes:
    """Return the received bytes; empty at the end of the connection, or if it breaks before the answer is complete."""
    try:
        return sock.recv(RECEIVE_BYTES)
    except ConnectionError:
        return b""
