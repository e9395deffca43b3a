"""Cuts the bytes of a stream into whole server-sent events."""

import json
import re
from dataclasses import dataclass
from typing import Any

_BORDER = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_BORDER_BYTES_MAX = 4


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `raw`: its bytes, with the empty line at its end. `data`: None if it has no such line."""

    raw: bytes
    name: bytes
    id: str | None
    data: bytes | None

    @property
    def is_done(self) -> bool:
        """Whether it is the marker at the end of OpenAI's streams."""
        return self.data is not None and self.data.startswith(b"[DONE]")

    @property
    def is_error(self) -> bool:
        """Whether it says that the answer has failed."""
        return self.name == b"error"


def parse_event(raw: bytes) -> Event:
    """The event that these bytes are."""
    name, event_id = b"", None
    data: list[bytes] = []
    for line in raw.splitlines():
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"id":
            event_id = value.decode("ascii", "replace")
        elif field == b"event":
            name = value
    return Event(raw, name, event_id, b"\n".join(data) if data else None)


class EventCutter:
    """Collects bytes until an event is complete."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that are complete with these bytes."""
        searched = max(0, len(self._pending) - _BORDER_BYTES_MAX)
        content = self._pending + piece
        begin, events = 0, []
        for border in _BORDER.finditer(content, searched):
            events.append(parse_event(content[begin : border.end()]))
            begin = border.end()
        self._pending = content[begin:]
        return events

    def rest(self) -> bytes:
        """The bytes of an event that is not complete."""
        rest, self._pending = self._pending, b""
        return rest


def json_object(content: bytes | None) -> dict[str, Any]:
    """The JSON object in these bytes; an empty one if they are something else."""
    try:
        value = json.loads(content or b"")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def error_of(content: bytes | None) -> dict[str, Any]:
    """The fields of OpenAI's error envelope in these bytes; none if they are something else."""
    error = json_object(content).get("error")
    return error if isinstance(error, dict) else {}
