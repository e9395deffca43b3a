"""HTTP/1.1 of a client."""

from collections.abc import Mapping

import httptools

from simulation.clients.exchange import Exchange


class Http1Exchange(Exchange):
    """Its own parser's protocol."""

    def __init__(self, *, is_slow: bool) -> None:
        super().__init__(is_slow=is_slow)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()] + [f"Content-Length: {len(body)}", "", ""]
        self._connection.transport.write("\r\n".join(lines).encode() + body)

    def _receive(self, data: bytes) -> str:
        self._parser.feed_data(data)
        return ""

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.has_ended = True

    def pause(self) -> None:
        self._connection.transport.pause_reading()

    def resume(self) -> None:
        self._connection.transport.resume_reading()
