"""The log has one line per event on stderr, as text or JSON, for this program and for libraries alike."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.dev import ConsoleRenderer
from structlog.processors import JSONRenderer

from services.core.errors import Reason
from services.runtime.log import PlainText, json_line
from tests.support.clock import WAIT_S

CODE = """
import asyncio, logging, structlog
from services.runtime.log import configure_logging

configure_logging("worker", level="{level}", log_format="{log_format}")
log = structlog.get_logger()

async def main():
    log.debug("small")
    log.info("ours", count=3, name="größer")
    logging.getLogger("library").warning("theirs %d", 4)
    grpc = logging.getLogger("grpc._cython.cygrpc")
    grpc.debug("a line for each use of the loop")
    grpc.error("%s raised in core by servicer method [%s]", "ExecuteBatchError", "/a/B")  # Its client had left.
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("broken")
        logging.getLogger("library").exception("broken too")

asyncio.run(main())
"""


def logged(log_format: str, level: str = "info") -> str:
    code = CODE.format(level=level, log_format=log_format)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "", "stdout belongs to the program"
    return done.stderr


def records(level: str = "info") -> list[dict[str, Any]]:
    return [json.loads(line) for line in logged("json", level).splitlines()]


def test_json_log_has_one_object_per_line_with_the_process() -> None:
    ours, theirs, broken, broken_too = records()

    assert (ours["event"], ours["count"], ours["name"], ours["level"]) == ("ours", 3, "größer", "info")
    assert (theirs["event"], theirs["level"]) == ("theirs 4", "warning")
    assert {record["process"] for record in (ours, theirs, broken, broken_too)} == {"worker"}
    assert all(record["timestamp"].endswith("Z") for record in (ours, theirs))


def test_json_log_has_the_traceback_in_a_field() -> None:
    for record in records()[2:]:
        assert "ZeroDivisionError: division by zero" in record["exception"]
        assert record["exception"].startswith("Traceback")


def test_text_log_has_no_colours_unless_stderr_is_a_terminal() -> None:
    text = logged("text")

    assert "ours" in text
    assert "count=3" in text
    assert "theirs 4" in text
    assert text.count("ZeroDivisionError: division by zero") == 2
    assert "\x1b[" not in text


@dataclass
class Configured:
    """A configuration with a secret."""

    password: str = field(repr=False)


ODD = ["", "two words", "a=b", "it's", 'say "x"', "a\nb", "a\tb", "größer", "\ud800", Reason.OVERLOADED, None, 0.5, [1]]


@pytest.mark.parametrize("value", ODD)
def test_plain_text_equals_structlogs_console_renderer(value: Any) -> None:
    console = ConsoleRenderer(colors=False, pad_event_to=0)
    line = {"timestamp": "now", "level": "info", "event": "two words", "z": 1, "b": value, "process": "p"}

    assert PlainText()(None, "info", dict(line)) == console(None, "info", dict(line))


class Name(str):
    """A subclass of str, as aiohttp's header names are."""

    __slots__ = ()


SECRET = Configured("secret")


@pytest.mark.parametrize("value", [*ODD, {"a": [1]}, (1, 2), True, Reason, Name("x"), SECRET, [SECRET], {"a": SECRET}])
def test_json_line_equals_structlogs_json_renderer(value: Any) -> None:
    line = {"event": "two words", "b": value}

    assert json.loads(json_line(None, "info", line)) == json.loads(JSONRenderer()(None, "info", line))


def test_values_cannot_inject_lines_or_terminal_escapes() -> None:
    line = PlainText()(
        None, "info", {"timestamp": "now", "level": "info", "event": "e", "why": "a\u2028b\x1b[2Jc\x85d"}
    )

    assert line == r"now [info     ] e why='a\u2028b\x1b[2Jc\x85d'"


@pytest.mark.parametrize(("level", "count"), [("debug", 5), ("info", 4), ("warning", 3), ("error", 2)])
def test_events_below_the_level_are_not_logged(level: str, count: int) -> None:
    lines = [record for record in records(level) if record["event"] != "Using selector: EpollSelector"]

    assert len(lines) == count


def test_closed_stderr_causes_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code = CODE.format(level="info", log_format="text") + "print('went on')"
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writing, text=True, timeout=WAIT_S, check=False
        )
    finally:
        os.close(writing)

    assert done.stdout == "went on\n"


SAY = """
import logging, structlog
from services.runtime.log import configure_logging, log_event

configure_logging("worker", level="{level}", log_format="{log_format}")
log = structlog.get_logger()
for level in (logging.DEBUG, logging.INFO, logging.WARNING):
    log.log(level, "request", count=3, why="it's late")
    log_event(level, "request", {{"count": 3, "why": "it's late"}})
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("info", 2), ("error", 0)])
def test_log_event_writes_the_same_line_as_a_logger(log_format: str, level: str, count: int) -> None:
    code = SAY.format(level=level, log_format=log_format)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)

    lines = [re.sub(r"\d{4}-\d\d-\d\dT[\d:.]*Z", "now", line) for line in done.stderr.splitlines()]
    if log_format == "json":
        lines = [str(sorted(json.loads(line).items())) for line in lines]
    assert len(lines) == 2 * count
    assert lines[::2] == lines[1::2]


WRONG = """
import logging
from services.runtime.log import configure_logging

configure_logging("worker", level="info", log_format="json")
logging.getLogger("library").warning("%d lines", "no number")
logging.getLogger("library").warning("%d lines", 3)
print("went on")
"""


def test_malformed_log_call_of_a_library_causes_no_error() -> None:
    done = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, timeout=WAIT_S, check=True)

    assert done.stdout == "went on\n"
    assert "TypeError: %d format" in done.stderr
    assert json.loads(done.stderr.splitlines()[-1])["event"] == "3 lines"
