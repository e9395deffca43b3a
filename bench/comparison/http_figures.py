"""What HTTP streams cost a system, and how soon and how evenly their tokens arrive."""

import time
from dataclasses import replace

from bench.clients.first_token_probes import probing
from bench.clients.sampled_streams import Sampler, sampled_count
from bench.clients.wrk import Load, run_wrk
from bench.comparison.rounds import Figures
from bench.comparison.systems import Running
from bench.measure.process_usage import cpu_seconds, cpu_seconds_of, memory_peak
from bench.measure.quantiles import milliseconds


def steady(running: Running, load: Load, idle_kib: float) -> Figures:
    """Measure one run of streams with no other load; a few of them are read by the sampling process, the others by wrk.

    `idle_kib`: the frontend's memory before its first load. Raises BenchError if an answer was not complete.
    """
    sampled = sampled_count(load.streams)
    others = replace(load, streams=load.streams - sampled)
    with Sampler(running.url, replace(load, streams=sampled)) as sampler, memory_peak(running.pid) as peak:
        cpu_s, workers_s = cpu_seconds(running.pid), cpu_seconds_of(running.workers)
        began = time.perf_counter()
        sampler.start()
        if others.streams:
            run_wrk(running.url, others)
        ended_at = time.perf_counter() if others.streams else began
        sample = sampler.sample()
        cpu_s, workers_s = cpu_seconds(running.pid) - cpu_s, cpu_seconds_of(running.workers) - workers_s
    elapsed_s = max(ended_at, sample.ended_at) - began
    return {
        "cpu_us_per_token": cpu_s * 1e6 / load.total_tokens,
        "cpu_us_per_event": cpu_s * 1e6 / load.total_tokens * sample.tokens_per_event,
        "cores": cpu_s / elapsed_s,
        "tokens_per_s": load.total_tokens / elapsed_s,
        "tokens_per_event": sample.tokens_per_event,
        "workers_us_per_token": workers_s * 1e6 / load.total_tokens,
        "memory_kib_per_stream": (peak.kib - idle_kib) / load.streams,
        **milliseconds(sample.gaps_s, "event_gap_ms"),
    }


def probed(running: Running, load: Load) -> Figures:
    """Measure the time to the first token in a run of its own, because the probes cost CPU."""
    with probing(running.url) as first_tokens_s:
        run_wrk(running.url, load)
    return milliseconds(first_tokens_s, "first_token_ms")
