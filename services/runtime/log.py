"""Logs, alike in every process: one line per event, on stderr."""

import atexit
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec
import structlog

from services.runtime.log_writer import LineWriter


def _to_stderr(lines: Iterable[str]) -> None:
    """A log that can't be written must not fail a request: there is nowhere to say so."""
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{line}\n" for line in lines))


class _Lines:
    """Writes our own lines. By way of the standard library, as those of libraries go, each cost twice as much: in a
    storm of refusals that is time for which the next one waits.
    """

    def __init__(self, *_: object) -> None:
        """What structlog gives to a logger, and none of it matters here."""

    def write(self, line: str) -> None:
        _write([line])

    debug = info = warning = error = critical = exception = write


class _LineHandler(logging.Handler):
    """Writes those of libraries."""

    def emit(self, record: logging.LogRecord) -> None:
        """As the standard library's handlers: what a library gets wrong in a line must not fail what it does."""
        try:
            if _is_news(record):
                _write([self.format(record)])
        except Exception:
            self.handleError(record)


_write: Callable[[Iterable[str]], None] = _to_stderr
_LEVELS = {number: name.lower() for name, number in logging.getLevelNamesMapping().items()}
_lines = _Lines()
_level = logging.NOTSET
_processors: Sequence[structlog.typing.Processor] = structlog.get_config()["processors"]
"""structlog's own list: who changes what is in it is heard here, too."""


Event = tuple[int, str, dict[str, Any]]
"""Level, name and fields, which are the event's from now on."""


def say(level: int, event: str, fields: dict[str, Any]) -> None:
    """As structlog's `log`, without the logger: every request has a line, and feels what that costs."""
    say_all([(level, event, fields)])


def say_all(events: Iterable[Event]) -> None:
    """The same for many, in few writes."""
    lines = (_line_of(level, name, fields) for level, name, fields in events if level >= _level)
    _write([line for line in lines if line is not None])


def _line_of(level: int, name: str, fields: dict[str, Any]) -> str | None:
    """None if a processor wants no line."""
    said: Any = fields
    fields["event"] = name
    try:
        for processor in _processors:
            said = processor(_lines, _LEVELS[level], said)
    except structlog.DropEvent:
        return None
    return str(said)


_WORD = re.compile(r"[^\s\x00-\x1f\x7f='\"]*")
_TRACES = frozenset({"exc_info", "exception", "stack"})


class PlainText:
    """Writes lines as structlog's console does without colours, in a fourth of its time: every request has one."""

    def __init__(self) -> None:
        self._console = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        if not _TRACES.isdisjoint(event):
            return self._console(logger, name, event)
        head = f"{event.pop('timestamp')} [{event.pop('level'):<9}] {event.pop('event')}"
        return " ".join([head, *(f"{key}={_shown(event[key])}" for key in sorted(event))])


def _shown(value: object) -> str:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else repr(value)


class _Stamp:
    """Says of each event whose it is, how grave, and when: structlog's two processors take three times as long."""

    def __init__(self, process: str) -> None:
        self._process = process

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        second, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
        event["process"] = self._process
        event["level"] = name
        event["timestamp"] = f"{_written(second)}.{microseconds:06d}Z"
        return event


@lru_cache(maxsize=1)
def _written(second: int) -> str:
    """As ISO 8601 has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


_SCALARS = (str, int, float, type(None))
_encode = msgspec.json.Encoder().encode


def json_line(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
    """As structlog's JSONRenderer, in less time for what most lines are made of. It shows what is no JSON by `repr`,
    which leaves secrets out: msgspec would encode all fields of a dataclass.
    """
    if all(isinstance(value, _SCALARS) for value in event.values()):
        with suppress(UnicodeEncodeError, TypeError):  # Half of a surrogate pair, from a client; a subclass of str.
            return _encode(event).decode()
    return str(structlog.processors.JSONRenderer()(logger, name, event))


def _renderer(log_format: str) -> structlog.typing.Processor:
    if log_format == "json":
        return json_line
    return structlog.dev.ConsoleRenderer(pad_event_to=0) if sys.stderr.isatty() else PlainText()


_CLIENT_GONE = "ExecuteBatchError raised in core by servicer method"


def _is_news(record: logging.LogRecord) -> bool:
    """All but what gRPC calls an error: that a client had left when the end was sent to it, as it may at any moment."""
    return not record.getMessage().startswith(_CLIENT_GONE)


def _writer() -> Callable[[Iterable[str]], None]:
    """To the file that stderr is, for whose readers nobody waits."""
    try:
        writer = LineWriter(sys.stderr.fileno(), _note_left_out)
    except OSError:  # It is none, but something in this process.
        return _to_stderr
    atexit.register(writer.close)
    return writer.write


def _note_left_out(lines: int) -> None:
    structlog.get_logger().warning("log was not read", lines_left_out=lines)


def configure_logging(process: str, *, level: str, log_format: str) -> None:
    """Send the logs of this process and of its libraries to stderr as `text` or `json`, marked with `process`."""
    shared: list[structlog.typing.Processor] = [
        _Stamp(process),
        *([structlog.processors.format_exc_info] if log_format == "json" else []),
    ]
    global _level, _processors, _write  # As structlog's own configuration, they are the process's.
    _write = _writer()
    _level = logging.getLevelNamesMapping()[level.upper()]
    renderer = _renderer(log_format)
    _processors = [*shared, renderer]
    structlog.configure(
        processors=_processors,
        logger_factory=_Lines,
        wrapper_class=structlog.make_filtering_bound_logger(_level),
        cache_logger_on_first_use=True,
    )
    handler = _LineHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc").setLevel(max(root.level, logging.WARNING))  # Below, it speaks of its own loop alone.


def log_config(config: object) -> None:
    """Say once how the process is configured: all of a dataclass but the fields that have `repr=False`, its secrets."""
    structlog.get_logger().info("configuration", config=config)
