"""Some streams beside those of `wrk`, which can't tell when an event came: read by a process of its own.

python -m bench.clients.sampled_streams URL STREAMS ANSWERS TOKENS
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bench.clients.requests import request_body
from bench.clients.stream_reader import Answer, read_answers
from bench.clients.wrk import Load
from bench.measure.child_process import ChildProcess, send, wait_for_start
from bench.measure.errors import BenchError

STREAMS_MAX = 4


@dataclass(frozen=True)
class Sample:
    """ended_at: by `time.perf_counter`, which all processes of a machine share. gaps_s: between events."""

    ended_at: float
    tokens_per_event: float
    gaps_s: list[float]


def sampled_streams(streams: int) -> int:
    """How many of a run's streams are read here: one at least, and so few that `wrk` has the load."""
    return min(STREAMS_MAX, max(1, streams // 4))


class Sampler:
    """The process, as a context; it is ready then, and reads nothing before `begin`."""

    def __init__(self, url: str, load: Load) -> None:
        self._helper = ChildProcess("clients.sampled_streams", url, load.streams, load.answers, load.tokens)
        self.begin = self._helper.begin

    def sample(self) -> Sample:
        """Wait for it. Raises BenchError if an answer was refused or cut off."""
        seen: dict[str, Any] = self._helper.receive()
        if "failed" in seen:
            raise BenchError(f"a sampled answer {seen['failed']}")
        return Sample(**seen)

    def __enter__(self) -> "Sampler":
        self._helper.__enter__()
        self._helper.receive()
        return self

    def __exit__(self, *error: object) -> None:
        self._helper.__exit__(*error)


def summary(answers: Iterable[Answer], tokens: int, ended_at: float) -> dict[str, Any]:
    """A Sample's fields, or what `failed`."""
    gaps_s, events, count = [], 0, 0
    for answer in answers:
        if not answer.is_complete:
            return {"failed": f"ended in {answer.raw[-200:]!r}"}
        gaps_s += answer.gaps_s
        events += len(answer.token_times)
        count += 1
    return asdict(Sample(ended_at, count * tokens / events, gaps_s))


def main(url: str, streams: int, answers: int, tokens: int) -> None:
    send("ready")
    wait_for_start()
    bodies = [request_body(tokens)] * streams
    read = [answer for _ in range(answers) for answer in read_answers(url, bodies)]
    ended_at = time.perf_counter()
    send(summary(read, tokens, ended_at))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
