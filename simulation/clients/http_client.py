"""A client of the OpenAI API over HTTP/1.1."""

import asyncio
import json
from typing import Any

import httptools

from simulation.clients.client import SLOW_S, Client
from simulation.clients.connection import Connection


class _Response:
    """A response as it comes. `body`: what has come and is not used yet."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.body = bytearray()
        self.has_ended = False

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.has_ended = True


class HttpClient(Client):
    """Streams with server-sent events, or gets the answer whole."""

    async def _attempt(self, frontend: int, *, resumes: bool) -> None:
        connection = Connection()
        if why := await connection.open_to(frontend):
            self._lose(why)
            return
        connection.transport.write(self._resumption() if resumes else self._request())
        try:
            await self._read(connection)
        finally:
            connection.transport.abort()

    async def _cancel(self) -> None:
        connection = Connection()
        if not await connection.open_to(self._plan.frontend):
            connection.transport.write(_encode("POST", f"/v1/requests/{self.id}/cancel", {}, b"{}"))
            await connection.read()
            connection.transport.abort()

    def _request(self) -> bytes:
        plan = self._plan
        body: dict[str, Any] = {
            "model": "mocker",
            "prompt": plan.prompt,
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "seed": plan.seed,
            "n": plan.n,
            "return_token_ids": True,
            "stream": plan.is_streamed,
        }
        if self._goes_on:
            body["generated_token_ids"] = self.answer.choices[0].token_ids
        if plan.is_streamed:
            body["stream_options"] = {"include_usage": True}
        if plan.stop:
            body["stop"] = list(plan.stop)
        if plan.logprobs is not None:
            body["logprobs"] = plan.logprobs
        headers = {"X-Request-Id": self.id}
        if plan.is_kept:
            headers |= {"X-On-Disconnect": "continue", "X-Detach-Grace": f"{plan.grace_s:g}"}
        if plan.deadline_s is not None:
            headers["X-Request-Timeout"] = f"{plan.deadline_s * 1e3:.0f}ms"
        return _encode("POST", "/v1/completions", headers, json.dumps(body).encode())

    def _resumption(self) -> bytes:
        headers = {"Accept": "text/event-stream"}
        if self.answer.cursor:
            headers["Last-Event-ID"] = self.answer.cursor
        return _encode("GET", f"/v1/streams/{self.id}", headers, b"")

    async def _read(self, connection: Connection) -> None:
        response = _Response()
        while not response.has_ended:
            data = await connection.read()
            if isinstance(data, str):
                self._lose(data)
                return
            response.feed(data)
            if response.status == 200 and self._plan.is_streamed:
                self._take_events(response.body)
                if self._acts():
                    return
                if self._plan.reader == "slow":
                    connection.transport.pause_reading()
                    await asyncio.sleep(SLOW_S)
                    connection.transport.resume_reading()
        self._take_end(response.status, bytes(response.body))

    def _take_end(self, status: int, body: bytes) -> None:
        if status != 200:
            self._take_error(json.loads(body)["error"])
        elif not self._plan.is_streamed:
            answer = json.loads(body)
            for choice in answer["choices"]:
                self._take_choice(choice)
            self.answer.usage = (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
            self.answer.is_complete = True
        elif not self.answer.is_over:
            self.answer.faults.append("a 200 that ends without [DONE]")

    def _take_events(self, body: bytearray) -> None:
        while (end := body.find(b"\n\n")) >= 0:
            fields = dict(line.split(": ", 1) for line in body[:end].decode().split("\n") if ": " in line)
            del body[: end + 2]
            self._take_event(fields)

    def _take_event(self, fields: dict[str, str]) -> None:
        if self.answer.is_complete:
            self.answer.faults.append("an event follows [DONE]")
        data = fields.get("data")
        if data == "[DONE]":
            self.answer.is_complete = True
        elif fields.get("event") == "error":
            self._take_error(json.loads(data or "")["error"])
        elif data is not None:
            event = json.loads(data)
            for choice in event["choices"]:
                self._take_choice(choice)
            if usage := event.get("usage"):
                self.answer.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        if fields.get("id", "done") != "done":
            self.answer.cursor = fields["id"]

    def _take_choice(self, choice: dict[str, Any]) -> None:
        logprobs = choice.get("logprobs")
        self.answer.add(
            choice["index"],
            None,
            choice.get("token_ids") or [],
            choice["text"],
            choice["finish_reason"],
            None if logprobs is None else len(logprobs["tokens"]),
        )

    def _take_error(self, error: dict[str, Any]) -> None:
        self.answer.failure, self.answer.detail = error["code"], error["message"]


def _encode(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()] + [f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body
