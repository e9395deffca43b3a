"""What clients see when one of two workers is lost under their streams: killed, or stopped as if it were frozen."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from signal import Signals

from bench.clients.requests import request_body
from bench.clients.stream_reader import Answer, Disturbance, read_answers
from bench.comparison.rounds import Figures
from bench.comparison.systems import ITL_MS, Running
from bench.measure.errors import BenchError
from bench.measure.quantiles import milliseconds

SIGNALS = (Signals.SIGKILL, Signals.SIGSTOP)
DISTURB_AT = 1 / 3
"""The signal is sent after this part of an answer's duration."""
SHARES = (0.5, 0.75, 0.99)
"""Half of the streams lose their worker, so the p75 of all streams is about the median of those."""


@dataclass
class SignalWorker:
    """Sends a signal to a worker when called. `sent_at`: by `time.perf_counter`."""

    pid: int
    signal: Signals
    sent_at: float = 0.0

    def __call__(self) -> None:
        os.kill(self.pid, self.signal)
        self.sent_at = time.perf_counter()


def measure_worker_loss(running: Running, signal: Signals, streams: int, tokens: int) -> Figures:
    """Run all streams undisturbed, then again with a signal to a worker. Raises BenchError if the first run fails."""
    prompts = [f"Stream number {number:04} begins" for number in range(streams)]
    bodies = [request_body(tokens, prompt, stream_options={"include_usage": True}) for prompt in prompts]
    sent = SignalWorker(running.workers[0], signal)
    undisturbed = read_answers(running.url, bodies)
    if not all(answer.is_complete for answer in undisturbed):
        raise BenchError("undisturbed answers were not complete")
    disturbed = read_answers(running.url, bodies, Disturbance(tokens * ITL_MS * 1e-3 * DISTURB_AT, sent))
    return compare_answers(undisturbed, disturbed, sent.sent_at, repeats=running.repeats)


def compare_answers(
    undisturbed: Sequence[Answer], disturbed: Sequence[Answer], sent_at: float, *, repeats: bool
) -> Figures:
    """Return counts of streams, and their longest gaps after the signal. `repeats`: equal requests get equal text."""
    gaps_s = [answer.longest_gap_s(sent_at) for answer in disturbed]
    pairs = list(zip(undisturbed, disturbed, strict=True))
    return {
        **milliseconds(gaps_s, "gap_ms", SHARES),
        "gap_ms_max": max(gaps_s) * 1e3,
        "complete": sum(answer.is_complete for answer in disturbed),
        "text_equal": sum(one.text == other.text for one, other in pairs) if repeats else None,
        "usage_right": sum(one.usage == other.usage for one, other in pairs),
    }
