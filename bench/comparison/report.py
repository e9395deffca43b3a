"""What all rounds come to, as a Markdown page: for each part a table of medians with their ranges, and ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.comparison.rounds import ECHO, MACHINE, OURS, PEER, Round, ratios, rows, spread, values

MISSING = "—"


@dataclass(frozen=True)
class Part:
    """A table. row: what its rows are. systems: its columns; of two the ratio is one more. figures: name and title."""

    name: str
    title: str
    note: str
    row: str
    systems: Sequence[str]
    figures: Mapping[str, str]


PARTS = (
    Part(
        "http",
        "OpenAI streams over HTTP",
        "A few of the streams are read by a process that takes the times, the others by wrk. Times to the first "
        "token are those of four more clients that ask again and again, in a run of its own: in all others "
        "nothing is beside the streams. All begin at once, and the highest percentiles are of that moment. A "
        "frontend that joins tokens sends fewer events: so there are figures for an event, too. The plane's share "
        "of the workers' CPU is all of it less what the mocker takes alone (below); Dynamo's mocker can't be "
        "measured alone. Memory is the frontend's most in the run less what it had before all runs: with few "
        "streams it says little. A p99 stands where a round had 20 values at least, and is the largest of fewer "
        "than 100; p99.9 likewise of 200 and 1,000.",
        "streams",
        (OURS, PEER),
        {
            "cpu_us_per_token": "frontend CPU, µs per token",
            "cpu_in_sends": "the same in bare sends",
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
            "plane_us_per_token": "of it the plane's, µs per token",
            "memory_kib_per_stream": "frontend memory, KiB per stream",
        },
    ),
    Part(
        "floor",
        "What nothing can cost less than",
        "A bare send is one event of as many bytes as ours, written to its client's socket by a server that does "
        "nothing else, under the same load from the same client; only the sends are counted. It spins for 10 µs "
        "after each, as a frontend has other things to do: in a burst without that the reader is woken once for "
        "many. The mocker alone is two engines with as many sequences, each in a process with nothing else.",
        "streams",
        (MACHINE,),
        {
            "send_us": "bare send, CPU µs per event",
            "burst_us": "the same in a burst, CPU µs per event",
            "engine_us": "mocker alone, CPU µs per token",
        },
    ),
    Part(
        "saturated",
        "Saturated",
        "The mockers are several times faster, so that something else limits. Frontend, workers and clients share "
        "the machine's cores: where the frontend has less than one core busy, it is not what limits.",
        "streams",
        (OURS, PEER),
        {
            "tokens_per_s": "tokens per second",
            "cpu_us_per_token": "frontend CPU, µs per token",
            "tokens_per_event": "tokens per event",
            "cpu_us_per_event": "frontend CPU, µs per event",
            "cores": "cores that the frontend had busy",
        },
    ),
    Part(
        "losses",
        "One of two workers lost",
        "By SIGKILL, or SIGSTOP as if it were frozen, in the midst of all answers. Half of the streams are on it, "
        "so the p75 of all is about the median of those. A stream that never goes on counts as long as it was "
        "waited for. Text and usage are compared with the same requests undisturbed; Dynamo's mocker draws at "
        "random, so its text can't be.",
        "signal, streams",
        (OURS, PEER),
        {
            "gap_ms_p50": "longest gap of a stream p50, ms",
            "gap_ms_p75": "longest gap of a stream p75, ms",
            "gap_ms_p99": "longest gap of a stream p99, ms",
            "gap_ms_max": "longest gap of all, ms",
            "complete": "streams complete",
            "text_equal": "streams with the right text",
            "usage_right": "streams with the right usage",
        },
    ),
    Part(
        "grpc",
        "gRPC streams",
        "Beside a bare grpc.aio server that writes each token as a message made beforehand, each 6 ms and no "
        "more. Both have the same client: raw sockets, up to eight connections. Our frontend joins tokens that "
        "come while a message is being written; the bare server does not.",
        "streams",
        (OURS, ECHO),
        {
            "cpu_us_per_token": "server CPU, µs per token",
            "tokens_per_message": "tokens per message",
            "tokens_per_s": "tokens per second",
            "cores": "cores that the server had busy",
            "client_cores": "cores that the client had busy",
        },
    ),
)


def document(rounds: Sequence[Round], about: Mapping[str, str], failures: Sequence[str]) -> str:
    """The whole page. about: what was measured, where and with what. failures: what is missing, and why."""
    sections = [section(part, rounds) for part in PARTS if rows(rounds, part.name)]
    missing = ["## What failed", "\n".join(f"- {failure}" for failure in failures)] if failures else []
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    note = (
        "Medians of the rounds, and their range in parentheses. A ratio is that of one round, the first to the second."
    )
    return "\n\n".join(["# Side by side", facts, note, *missing, *sections]) + "\n"


def section(part: Part, rounds: Sequence[Round]) -> str:
    return "\n\n".join([f"## {part.title}", part.note, table(part, rounds)])


def table(part: Part, rounds: Sequence[Round]) -> str:
    """Figure by figure, and row by row in each."""
    columns = ["figure", part.row, *part.systems, *(["ratio"] if len(part.systems) == 2 else [])]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    for figure, title in part.figures.items():
        lines += [[title, row, *cells(part, rounds, row, figure)] for row in rows(rounds, part.name)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(part: Part, rounds: Sequence[Round], row: str, figure: str) -> list[str]:
    columns = [values(rounds, part.name, row, system, figure) for system in part.systems]
    if len(columns) == 2:
        columns.append(ratios(*columns))
    return [str(spread(column) or MISSING) for column in columns]
