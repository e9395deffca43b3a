"""Reads streamed answers with raw sockets and epoll, and notes when each piece came: so little work for a token that it
disturbs neither what it measures nor its own clock. What the pieces say is looked at afterwards.
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
"""Who has got nothing for so long, when nobody has, gets nothing any more."""
_EVENT = re.compile(rb"^data: (\{.*\})\r?$", re.MULTILINE)


@dataclass(frozen=True)
class Event:
    """One server-sent event. at: when its last byte came, by `time.perf_counter`."""

    at: float
    content: Any

    @property
    def text(self) -> str:
        """Empty if it has none, or no choice at all."""
        return "".join(choice.get("text") or "" for choice in self.content.get("choices") or ())


@dataclass
class Answer:
    """One answer as it came. pieces: when, and which bytes. over_at: when it ended, or was waited for no longer."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    over_at: float = 0.0

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    @property
    def events(self) -> list[Event]:
        """All but the last, `[DONE]`. Relies on servers that cut no event into HTTP chunks."""
        ends = list(accumulate(len(data) for _, data in self.pieces))
        return [
            Event(self.pieces[bisect_left(ends, found.end(1))][0], json.loads(found[1]))
            for found in _EVENT.finditer(self.raw)
        ]

    @property
    def is_complete(self) -> bool:
        """It says so itself, and tells no error."""
        return b"\ndata: [DONE]" in self.raw and not any("error" in event.content for event in self.events)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def usage(self) -> tuple[int, int] | None:
        """Tokens of prompt and of answer, if it tells them."""
        for event in reversed(self.events):
            if used := event.content.get("usage"):
                return used["prompt_tokens"], used["completion_tokens"]
        return None

    @property
    def token_times(self) -> list[float]:
        """Of each event that brought text."""
        return [event.at for event in self.events if event.text]

    @property
    def gaps_s(self) -> list[float]:
        """Between two events that brought text."""
        return [after - before for before, after in pairwise(self.token_times)]

    def longest_gap_s(self, since: float) -> float:
        """Of those that ended after `since`; where an answer does not end well, the wait for more counts."""
        times = self.token_times
        ends = times if self.is_complete else [*times, self.over_at]
        return max((after - before for before, after in pairwise(ends) if after > since), default=0.0)


@dataclass(frozen=True)
class Disturbance:
    """Something to do so many seconds after all were asked."""

    after_s: float
    act: Callable[[], None]


def read_answers(url: str, bodies: Sequence[bytes], disturbance: Disturbance | None = None) -> list[Answer]:
    """Ask all at once, each on a connection of its own; return when all have ended or nobody got anything for long."""
    place = urlsplit(url)
    answers = [Answer() for _ in bodies]
    under_way: dict[int, tuple[socket.socket, Answer]] = {}
    with select.epoll() as epoll:
        for body, answer in zip(bodies, answers, strict=True):
            sock = socket.create_connection((place.hostname, place.port), timeout=REPLY_S_MAX)
            sock.sendall(post(place.netloc, body))
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
    """Takes out those that end."""
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
    """Empty at the end, also where it is a broken connection: the answer then does not say that it is complete."""
    try:
        return sock.recv(RECEIVE_BYTES)
    except ConnectionError:
        return b""
