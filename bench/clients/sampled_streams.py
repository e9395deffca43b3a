"""Streams that are read by a process of their own, to time each event: `wrk`, which makes the load, cannot.

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
    """`ended_at`: by `time.perf_counter`, which all processes of a machine share. `gaps_s`: between two events."""

    ended_at: float
    tokens_per_event: float
    gaps_s: list[float]


def sampled_count(streams: int) -> int:
    """Return how many of a run's streams to sample: at least one, and few enough to leave the load to `wrk`."""
    return min(STREAMS_MAX, max(1, streams // 4))


class Sampler:
    """The sampling process as a context manager. On entry it is ready; it sends nothing before `start`."""

    def __init__(self, url: str, load: Load) -> None:
        self._child = ChildProcess("clients.sampled_streams", url, load.streams, load.answers, load.tokens)
        self.start = self._child.start

    def sample(self) -> Sample:
        """Wait for the process to finish. Raises BenchError if an answer was refused or cut off."""
        received: dict[str, Any] = self._child.receive()
        if "failed" in received:
            raise BenchError(f"a sampled answer {received['failed']}")
        return Sample(**received)

    def __enter__(self) -> "Sampler":
        self._child.__enter__()
        self._child.receive()
        return self

    def __exit__(self, *error: object) -> None:
        self._child.__exit__(*error)


def summary(answers: Iterable[Answer], tokens: int, ended_at: float) -> dict[str, Any]:
    """Return the fields of a Sample, or `failed` with the reason."""
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
