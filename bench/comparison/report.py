"""The results of all rounds as a Markdown page: for each part a table of medians with their ranges, and ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.comparison.goals import goal_lines
from bench.comparison.rounds import (
    BARE_H2,
    ECHO,
    GRPC,
    GRPC_EACH,
    HTTP_1,
    HTTP_2,
    KEPT,
    MACHINE,
    NOT_KEPT,
    OURS,
    PEER,
    SMG,
    Round,
    ratios,
    rows,
    spread,
    values,
)

MISSING = "—"


@dataclass(frozen=True)
class Part:
    """A table of the page.

    `row`: what its rows are. `systems`: its columns. `figures`: names of figures and their titles. `others`: systems
    that the first one is divided by, in a column each.
    """

    name: str
    title: str
    note: str
    row: str
    systems: Sequence[str]
    figures: Mapping[str, str]
    others: Sequence[str] = ()


PARTS = (
    Part(
        "http",
        "OpenAI streams over HTTP",
        "A separate process reads a few of the streams and times their events; wrk reads the others. The time to "
        "the first token is measured in a run of its own, by four more clients that send requests again and again; "
        "all other runs have no load beside the streams. All streams begin at once, and the highest percentiles "
        "fall into that moment. A frontend that combines tokens sends fewer events, so some figures are per event "
        "as well. The workers' CPU beyond the mocker is their total less what the mocker takes alone (below); "
        "Dynamo's mocker cannot be measured alone. Memory is the frontend's maximum during the run less its memory "
        "before all runs: with few streams it says little. SMG passes the bytes of two of our frontends through, which "
        "have done the work by then. A p99 needs at least 20 values per round, and is the "
        "largest of fewer than 100; a p99.9 needs 200, and is the largest of fewer than 1,000.",
        "streams",
        (OURS, PEER, SMG),
        {
            "cpu_us_per_token": "frontend CPU, µs per token",
            "cpu_in_sends": "frontend CPU per token, in bare sends",
            "tokens_per_event": "tokens per event",
            "cpu_us_per_event": "frontend CPU, µs per event",
            "tokens_per_s": "tokens per second",
            "first_token_ms_p50": "time to first token p50, ms",
            "first_token_ms_p99": "time to first token p99, ms",
            "first_token_ms_p99.9": "time to first token p99.9, ms",
            "event_gap_ms_p50": "time between events p50, ms",
            "event_gap_ms_p99": "time between events p99, ms",
            "event_gap_ms_p99.9": "time between events p99.9, ms",
            "workers_us_per_token": "both workers' CPU, µs per token",
            "plane_us_per_token": "both workers' CPU beyond the mocker, µs per token",
            "memory_kib_per_stream": "frontend memory, KiB per stream",
        },
        (PEER, SMG),
    ),
    Part(
        "floor",
        "Lower bounds",
        "A bare send writes one event of the same size as ours to its client's socket, from a server that does "
        "nothing else, under the same load from the same client; only the sends are counted. The server spins for "
        "10 µs after each, because a frontend has other work to do: in a burst without pauses, the kernel wakes "
        "the reader once for many events. The mocker alone is two engines with the same number of sequences, each "
        "alone in its process.",
        "streams",
        (MACHINE,),
        {
            "send_us": "bare send, CPU µs per event",
            "burst_us": "bare send in a burst, CPU µs per event",
            "engine_us": "mocker alone, CPU µs per token",
        },
    ),
    Part(
        "saturated",
        "Saturated",
        "The mockers are several times faster, so that something else is the bottleneck. Frontend, workers and "
        "clients share the machine's cores: a frontend that keeps less than one core busy is not the bottleneck.",
        "streams",
        (OURS, PEER),
        {
            "tokens_per_s": "tokens per second",
            "cpu_us_per_token": "frontend CPU, µs per token",
            "tokens_per_event": "tokens per event",
            "cpu_us_per_event": "frontend CPU, µs per event",
            "cores": "cores kept busy by the frontend",
        },
        (PEER,),
    ),
    Part(
        "losses",
        "One of two workers lost",
        "The worker is lost by SIGKILL, or by SIGSTOP as if it were frozen, in the middle of all answers. Half of "
        "the streams run on it, so the p75 of all streams is about the median of the affected ones. A stream that "
        "never continues counts with the time that it was waited for. Text and usage are compared with those of "
        "the same requests without a fault; Dynamo's mocker samples at random, so its text cannot be compared.",
        "signal, streams",
        (OURS, PEER),
        {
            "gap_ms_p50": "longest gap of a stream p50, ms",
            "gap_ms_p75": "longest gap of a stream p75, ms",
            "gap_ms_p99": "longest gap of a stream p99, ms",
            "gap_ms_max": "longest gap of all streams, ms",
            "complete": "streams complete",
            "text_equal": "streams with the correct text",
            "usage_right": "streams with the correct usage",
        },
        (PEER,),
    ),
    Part(
        "kept",
        "Streams that can be resumed",
        "The same streams of Unbroken with and without `x-on-disconnect: continue`, in turn. Each has an id in every "
        "event, and its worker keeps a record of it. All streams begin and end at once, and one client reads them.",
        "streams",
        (KEPT, NOT_KEPT),
        {
            "cpu_us_per_token": "frontend CPU, µs per token",
            "workers_us_per_token": "both workers' CPU, µs per token",
            "all_us_per_token": "CPU of all three, µs per token",
        },
        (NOT_KEPT,),
    ),
    Part(
        "frontend",
        "One of two frontends lost",
        "The frontend is lost by SIGKILL in the middle of all answers, of which half are read over SSE and half over "
        "gRPC, by one process. The clients come back to the other frontend at once, with their cursor. Text, finish "
        "reason, log probabilities and usage are compared with those of an undisturbed run, whose gaps are told too. "
        "The engines count what they compute.",
        "streams of each wire",
        (OURS,),
        {
            "gap_ms_p50": "longest gap of a stream p50, ms",
            "gap_ms_p99": "longest gap of a stream p99, ms",
            "gap_ms_max": "longest gap of all streams, ms",
            "calm_gap_ms_p99": "the same undisturbed, p99, ms",
            "streams": "streams",
            "resumed": "streams resumed",
            "complete": "streams complete",
            "equal": "streams with the correct answer",
            "prompt_tokens_twice": "prompt tokens computed twice",
            "tokens_twice": "tokens drawn twice",
        },
    ),
    Part(
        "wires",
        "Wires",
        "The same streams of one frontend over each wire, in turn: over HTTP/1.1 on a connection each, over HTTP/2 and "
        "gRPC on up to eight, over gRPC also on one each. All have the same client, on raw sockets. The bare servers "
        "do nothing else: grpc.aio writes each token as a message made beforehand, every 6 ms; HTTP/2 writes "
        "such messages of a step for all streams of a connection at once, and decodes no header fields. An item is an "
        "event or a message. The time to the first token is measured in a run of its own, by four more clients.",
        "streams",
        (GRPC, GRPC_EACH, HTTP_2, HTTP_1, ECHO, BARE_H2),
        {
            "cpu_us_per_token": "server CPU, µs per token",
            "tokens_per_item": "tokens per item",
            "tokens_per_s": "tokens per second",
            "cores": "cores kept busy by the server",
            "client_cores": "cores kept busy by the client",
            "first_token_ms_p50": "time to first token p50, ms",
            "first_token_ms_p99": "time to first token p99, ms",
        },
        (HTTP_1, ECHO),
    ),
    Part(
        "wires_saturated",
        "Wires, saturated",
        "The same with mockers several times faster, and with bare servers that send as often. Server, workers and "
        "client share the cores, so what one core would do is told by the CPU time that the server took.",
        "streams",
        (GRPC, HTTP_1, ECHO, BARE_H2),
        {
            "tokens_per_core_s": "tokens per second of CPU",
            "tokens_per_s": "tokens per second",
            "tokens_per_item": "tokens per item",
            "cores": "cores kept busy by the server",
            "client_cores": "cores kept busy by the client",
        },
        (HTTP_1, ECHO),
    ),
    Part(
        "overload",
        "Overload",
        "One worker is full and stays so. Each client asks again as soon as it is refused, on a connection of its own; "
        "all of them are one process.",
        "clients",
        (GRPC, HTTP_1),
        {
            "cpu_us_each": "frontend CPU, µs per refusal",
            "refused_ms_p50": "time to refuse p50, ms",
            "refused_ms_p99": "time to refuse p99, ms",
            "refused_per_s": "refusals per second",
        },
        (HTTP_1,),
    ),
)


def document(rounds: Sequence[Round], about: Mapping[str, str], failures: Sequence[str]) -> str:
    """Return the whole page. `about`: what was measured, where and how. `failures`: what is missing, and why."""
    sections = [section(part, rounds) for part in PARTS if rows(rounds, part.name)]
    missing = ["## What failed", "\n".join(f"- {failure}" for failure in failures)] if failures else []
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    note = (
        "Each figure is the median of the rounds, with their range in parentheses. Under ÷ is the first system's "
        "figure divided by that system's in the same round."
    )
    goals = ["## Goals", "\n".join(lines)] if (lines := goal_lines(rounds)) else []
    return "\n\n".join(["# Side by side", facts, note, *missing, *goals, *sections]) + "\n"


def section(part: Part, rounds: Sequence[Round]) -> str:
    return "\n\n".join([f"## {part.title}", part.note, table(part, rounds)])


def table(part: Part, rounds: Sequence[Round]) -> str:
    """Return the table's lines, figure by figure and row by row."""
    columns = ["figure", part.row, *part.systems, *(f"÷ {other}" for other in part.others)]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    for figure, title in part.figures.items():
        lines += [[title, row, *cells(part, rounds, row, figure)] for row in rows(rounds, part.name)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(part: Part, rounds: Sequence[Round], row: str, figure: str) -> list[str]:
    columns = {system: values(rounds, part.name, row, system, figure) for system in part.systems}
    divided = [ratios(columns[part.systems[0]], columns[other]) for other in part.others]
    return [str(spread(column) or MISSING) for column in (*columns.values(), *divided)]
