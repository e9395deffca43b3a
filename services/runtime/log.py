"""Logging of every process: one line per event on stderr, as text or JSON."""

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
    """Write lines to stderr. Errors are ignored: a log that cannot be written must not fail a request."""
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{line}\n" for line in lines))


class _Lines:
    """The structlog logger that writes the lines of this program.

    It bypasses the standard library's logging, which doubles the cost of a line; under a storm of refusals that time
    delays the next refusal.
    """

    def __init__(self, *_: object) -> None:
        """Accepts and ignores the arguments that structlog passes."""

    def write(self, line: str) -> None:
        _write([line])

    debug = info = warning = error = critical = exception = write


class _LineHandler(logging.Handler):
    """Writes the lines of libraries, which use the standard library's logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record. As in the standard library's handlers, a malformed record must not fail the caller."""
        try:
            if not _is_expected(record):
                _write([self.format(record)])
        except Exception:
            self.handleError(record)


_write: Callable[[Iterable[str]], None] = _to_stderr
_LEVELS = {number: name.lower() for name, number in logging.getLevelNamesMapping().items()}
_lines = _Lines()
_level = logging.NOTSET
_processors: Sequence[structlog.typing.Processor] = structlog.get_config()["processors"]
"""structlog's own list object, so that changes to its content (as by `capture_logs`) also apply here."""


Event = tuple[int, str, dict[str, Any]]
"""Level, name and fields. The event owns the dict of fields."""


def log_event(level: int, event: str, fields: dict[str, Any]) -> None:
    """Log one event. Cheaper than structlog's `log`, for the line of each request."""
    log_events([(level, event, fields)])


def log_events(events: Iterable[Event]) -> None:
    """Log several events with few writes."""
    lines = (_line_of(level, name, fields) for level, name, fields in events if level >= _level)
    _write([line for line in lines if line is not None])


def _line_of(level: int, name: str, fields: dict[str, Any]) -> str | None:
    """Render an event. Returns None if a processor drops it."""
    rendered: Any = fields
    fields["event"] = name
    try:
        for processor in _processors:
            rendered = processor(_lines, _LEVELS[level], rendered)
    except structlog.DropEvent:
        return None
    return str(rendered)


_WORD = re.compile(r"[^\s\x00-\x1f\x7f='\"]*")
_TRACES = frozenset({"exc_info", "exception", "stack"})


class PlainText:
    """Renders lines as structlog's console renderer does without colours, in a quarter of its time."""

    def __init__(self) -> None:
        self._console = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        if not _TRACES.isdisjoint(event):
            return self._console(logger, name, event)
        head = f"{event.pop('timestamp')} [{event.pop('level'):<9}] {event.pop('event')}"
        return " ".join([head, *(f"{key}={_plain(event[key])}" for key in sorted(event))])


def _plain(value: object) -> str:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else repr(value)


class _Stamp:
    """Adds process, level and timestamp to each event, in a third of the time of structlog's own processors."""

    def __init__(self, process: str) -> None:
        self._process = process

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        second, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
        event["process"] = self._process
        event["level"] = name
        event["timestamp"] = f"{_iso_second(second)}.{microseconds:06d}Z"
        return event


@lru_cache(maxsize=1)
def _iso_second(second: int) -> str:
    """The second in ISO 8601. Cached, because most lines share it with the line before."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


_SCALARS = (str, int, float, type(None))
_encode = msgspec.json.Encoder().encode


def json_line(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
    """Render a line as structlog's JSONRenderer does, but faster if all values are scalars.

    JSONRenderer renders other objects by `repr`, which leaves secrets out; msgspec would encode every field of a
    dataclass.
    """
    if all(isinstance(value, _SCALARS) for value in event.values()):
        with suppress(UnicodeEncodeError, TypeError):  # A lone surrogate from a client; a subclass of str.
            return _encode(event).decode()
    return str(structlog.processors.JSONRenderer()(logger, name, event))


def _renderer(log_format: str) -> structlog.typing.Processor:
    if log_format == "json":
        return json_line
    return structlog.dev.ConsoleRenderer(pad_event_to=0) if sys.stderr.isatty() else PlainText()


_CLIENT_GONE = "ExecuteBatchError raised in core by servicer method"


def _is_expected(record: logging.LogRecord) -> bool:
    """Whether the record is gRPC's error that a client left before its end was sent, which is no error."""
    return record.getMessage().startswith(_CLIENT_GONE)


def _writer() -> Callable[[Iterable[str]], None]:
    """A function that writes lines to stderr without waiting for its reader."""
    try:
        writer = LineWriter(sys.stderr.fileno(), _log_left_out)
    except OSError:  # stderr is not a file but an object in this process.
        return _to_stderr
    atexit.register(writer.close)
    return writer.write


def _log_left_out(lines: int) -> None:
    structlog.get_logger().warning("log was not read", lines_left_out=lines)


def configure_logging(process: str, *, level: str, log_format: str) -> None:
    """Send the logs of this process and of its libraries to stderr as `text` or `json`, marked with `process`."""
    shared: list[structlog.typing.Processor] = [
        _Stamp(process),
        *([structlog.processors.format_exc_info] if log_format == "json" else []),
    ]
    global _level, _processors, _write  # Per process, as structlog's configuration.
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
    # At lower levels, hpack logs all header fields, keys included, and grpc what its poller does.
    logging.getLogger("hpack").setLevel(max(root.level, logging.INFO))
    logging.getLogger("grpc").setLevel(max(root.level, logging.WARNING))


def log_config(config: object) -> None:
    """Log the configuration once. Secrets are left out: they are dataclass fields with `repr=False`."""
    structlog.get_logger().info("configuration", config=config)
