"""A client of the OpenAI API."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from simulation.clients.client import SLOW_S, Client
from simulation.clients.exchange import Exchange
from simulation.clients.http1 import Http1Exchange
from simulation.clients.http2 import Http2Exchange

_EXCHANGES: Mapping[str, type[Exchange]] = {"http1": Http1Exchange, "http2": Http2Exchange}
_JSON: dict[str, str] = {"Content-Type": "application/json"}


class HttpClient(Client):
    """Streams with server-sent events, or gets the answer whole."""

    async def _attempt(self, frontend: int, *, resumes: bool) -> None:
        exchange = self._exchange()
        if why := await exchange.open_to(frontend):
            self._lose(why)
            return
        try:
            if resumes:
                self._send_resumption(exchange)
            else:
                self._send_request(exchange)
            await self._read(exchange)
        finally:
            exchange.abort()

    async def _cancel(self) -> None:
        exchange = self._exchange()
        if not await exchange.open_to(self._any_frontend()):
            exchange.send("POST", f"/v1/requests/{self.id}/cancel", _JSON | self._key, b"{}")
            await exchange.read()
            exchange.abort()

    def _exchange(self) -> Exchange:
        return _EXCHANGES[self._plan.wire](is_slow=self._plan.reader == "slow")

    def _send_request(self, exchange: Exchange) -> None:
        plan = self._plan
        body: dict[str, Any] = {
            "model": "mocker",
            "prompt": plan.prompts[0] if len(plan.prompts) == 1 else list(plan.prompts),
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
        headers = {"X-Request-Id": self.id} | self._wishes | self._key
        if plan.deadline_s is not None:
            headers["X-Request-Timeout"] = f"{plan.deadline_s * 1e3:.0f}ms"
        exchange.send("POST", "/v1/completions", _JSON | headers, json.dumps(body).encode())

    def _send_resumption(self, exchange: Exchange) -> None:
        headers = {"Accept": "text/event-stream"} | self._key
        if self.answer.cursor:
            headers["Last-Event-ID"] = self.answer.cursor
        exchange.send("GET", f"/v1/streams/{self.id}", headers, b"")

    async def _read(self, exchange: Exchange) -> None:
        while not exchange.has_ended:
            if why := await exchange.read():
                self._lose(why)
                return
            if exchange.status == 200 and self._plan.is_streamed:
                self._take_events(exchange.body)
                if self._acts():
                    return
                if self._plan.reader == "slow" and not exchange.has_ended:
                    exchange.pause()
                    await asyncio.sleep(SLOW_S)
                    exchange.resume()
        self._take_end(exchange.status, bytes(exchange.body))

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
