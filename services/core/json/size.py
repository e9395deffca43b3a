"""Bounds how many values the text of a JSON body has, before it is decoded.

msgspec makes all values of a text in one call, and Python runs no other thread meanwhile: not even the event loop. So
it does not help to decode in a thread. Text in strings costs next to nothing.
"""

from collections.abc import Iterator

from services.core.errors import Failure, Reason

VALUES_MAX = 262_144
"""Values, without those that begin a list or an object. It takes up to 20 ms to make so many."""
CONTAINERS_MAX = 16_384
"""Lists and objects. Python's parser makes each in up to 1 µs."""
WINDOW_BYTES = 256 * 1024
"""How much of a text is counted in one call, which holds up other threads."""


def check_size(text: bytes, path: str = "") -> None:
    """Raises Failure(INVALID_ARGUMENT) for more than VALUES_MAX values, or more than CONTAINERS_MAX lists and objects.

    `text`: need not be JSON. `path`: of the value in the request.
    """
    if len(text) <= CONTAINERS_MAX or _fits(text):  # What is in strings is counted too, and few enough in most texts.
        return
    values = containers = strings = 0
    for outside, in_window in _outside_strings(text):
        values += outside.count(b",")
        containers += outside.count(b"[") + outside.count(b"{")
        strings += in_window
        if values > VALUES_MAX or strings > 2 * (VALUES_MAX + CONTAINERS_MAX):  # Of keys as well.
            raise _too_many(path, VALUES_MAX, "values")
        if containers > CONTAINERS_MAX:
            raise _too_many(path, CONTAINERS_MAX, "lists and objects")


def _fits(text: bytes) -> bool:
    values = containers = 0
    for start in range(0, len(text), WINDOW_BYTES):
        end = start + WINDOW_BYTES
        values += text.count(b",", start, end)
        containers += text.count(b"[", start, end) + text.count(b"{", start, end)
        if values > VALUES_MAX or containers > CONTAINERS_MAX:
            return False
    return True


def _outside_strings(text: bytes) -> Iterator[tuple[bytes, int]]:
    """The text that is in no string, with how many strings end or begin in it, window by window."""
    start, is_inside = 0, False
    while start < len(text):
        window = text[start : start + WINDOW_BYTES]
        if (len(window) - len(window.rstrip(b"\\"))) % 2:  # It ends within an escape.
            window = text[start : start + WINDOW_BYTES + 1]
        start += len(window)
        pieces = window.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(pieces[is_inside::2]), len(pieces) // 2
        is_inside ^= len(pieces) % 2 == 0


def _too_many(path: str, most: int, what: str) -> Failure:
    detail = f"{path or 'the body'} has more than {most} {what}: send fewer"
    return Failure(Reason.INVALID_ARGUMENT, detail, param=path or None)
