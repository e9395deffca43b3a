"""Clients of answers that outlive their connections: they keep what they get, and come back for the rest.

Over SSE here, over gRPC in returning_grpc.py.
"""

import json
import socket
import struct
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp

from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.requests import REQUEST_S_MAX
from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import until

CONTINUE = {"X-On-Disconnect": "continue"}
R = TypeVar("R", bound="Returning")
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing the socket resets the connection."""
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Kept:
    """What a client has of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    continuation: str | None = None

    def take(self, one: Mapping[str, Any]) -> None:
        """Add an event's choice, or a whole one."""
        assert self.finish is None, "a choice continued after its finish reason"
        said = one.get("delta") or one.get("message") or {}
        self.text += one.get("text", "") + said.get("content", "")
        self.token_ids += one.get("token_ids", ())
        self.logprobs += _entries(one["logprobs"])
        self.finish, self.continuation = one["finish_reason"], one.get("continuation")


def _entries(logprobs: Mapping[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[column] for column in columns), strict=True))


@dataclass(eq=False, kw_only=True)
class Returning:
    """One client and its answer, whichever the protocol.

    `ids`: the cursors of all events of choices. `has_ended`: the end marker has come. `error`: that of the last stream.
    `generation_id`, `seed`: as the stream said. `is_partial`: it has gone on without the choices that had ended, so
    that the usage is that of the others.
    """

    choices: dict[int, Kept] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    usage: Mapping[str, int] | None = None
    has_ended: bool = False
    error: Mapping[str, Any] | None = None
    generation_id: str = ""
    seed: int | None = None
    is_partial: bool = False

    @property
    def has_stop(self) -> bool:
        """Whether a stop string ends the answer. Engines are told so late, and compute some tokens more."""
        raise NotImplementedError

    @property
    def keeps_tokens(self) -> bool:
        """Whether it gets token ids, so that it can go on without anybody else."""
        raise NotImplementedError

    @property
    def cursor(self) -> str:
        """The id of the last event; empty before the first one."""
        return self.ids[-1] if self.ids else ""

    @property
    def whole(self) -> tuple[dict[int, Kept], Mapping[str, int] | None, str]:
        """The answer, which must be complete: choices, usage and the last id, which sums up all token ids."""
        assert self.error is None, self.error
        assert self.has_ended, "the stream ended without its marker"
        assert all(choice.finish for choice in self.choices.values())
        return self.choices, self.usage, self.cursor

    async def ask(self: R, frontend: Frontend, *, events_max: int | None = None) -> R:
        """Send the request, and read to the end, until the connection is cut, or for some events: then cut it."""
        raise NotImplementedError

    async def come_back(self: R, frontend: Frontend, *, events_max: int | None = None) -> R:
        """Ask for the rest by the id of the answer, unless all of it has come. Raises Refused."""
        raise NotImplementedError

    async def go_on(self: R, frontend: Frontend) -> R:
        """Send the request again with the tokens of it that have come, and the seed: nobody else knows the answer."""
        raise NotImplementedError

    async def come_back_once_known(self: R, frontend: Frontend) -> R:
        """Come back until the answer has ended: a frontend may not know yet where it is, and the process that accepts
        the connection may be the one that dies. Raises Refused.
        """

        async def has_come() -> bool:
            try:
                await self.come_back(frontend)
            except Refused as refused:
                if refused.reason != "NO_WORKERS":
                    raise
            return self.has_ended or self.error is not None

        await until(has_come)
        return self

    async def come_back_unless_taken(self, frontend: Frontend) -> None:
        """Come back. The answer may be taken before the first event: then `error` says so as well."""
        try:
            await self.come_back(frontend)
        except Refused as refused:
            self.error = refused.error

    def twin(self: R) -> R:
        """A client that has what this one has."""
        return replace(self, choices=deepcopy(self.choices), ids=[*self.ids])

    def anew(self: R) -> R:
        """A client that asks the same and has nothing."""
        return replace(self, choices={}, ids=[], usage=None, has_ended=False, error=None)

    def known(self, count: int) -> list[Kept]:
        """What it has of each of `count` choices, to go on after that."""
        known = [self.choices.get(index, Kept()) for index in range(count)]
        self.is_partial = any(one.finish for one in known)
        return known


@dataclass(eq=False)
class ReturningClient(Returning):
    """A client over SSE. `needs_ids`: whether events have ids. Its first response's headers say id and seed."""

    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=lambda: CONTINUE)
    needs_ids: bool = field(default=True, kw_only=True)

    @property
    def has_stop(self) -> bool:
        return self.body.get("stop") is not None

    @property
    def keeps_tokens(self) -> bool:
        return bool(self.body.get("return_token_ids"))

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"

    async def ask(self, frontend: Frontend, *, events_max: int | None = None) -> "ReturningClient":
        """Send the request, and read to the end, until the connection is cut, or for some events: then reset it."""
        async with _session() as session:
            request = session.post(f"{frontend.http}{self.path}", json={**STREAM, **self.body}, headers=self.headers)
            await self._read(request, events_max)
        return self

    async def come_back(
        self, frontend: Frontend, *, events_max: int | None = None, **headers: str
    ) -> "ReturningClient":
        """Ask for the rest by the id of the answer, unless all of it has come. Raises Refused."""
        if self.has_ended:
            return self
        given = {"Last-Event-ID": self.cursor, **headers} if self.ids else headers
        async with _session() as session:
            request = session.get(f"{frontend.http}/v1/streams/{self.generation_id}", headers=given)
            await self._read(request, events_max)
        return self

    async def go_on(self, frontend: Frontend) -> "ReturningClient":
        """Send the request again with the tokens of it that have come, and the seed: nobody else knows the answer."""
        if self.has_ended:
            return self
        count = len(self.body["prompt"]) if isinstance(self.body.get("prompt"), list) else 1
        brought: list[Any] = [None if one.finish else one.token_ids for one in self.known(count * self.body["n"])]
        fields = {"seed": self.seed, "generated_token_ids": brought[0] if len(brought) == 1 else brought}
        self.ids = []
        async with _session() as session:
            body = {**STREAM, **self.body, **fields}
            await self._read(session.post(f"{frontend.http}{self.path}", json=body, headers=self.headers), None)
        return self

    async def repeat(self, frontend: Frontend) -> "ReturningClient":
        """Send the request again, with the ids of the answer and of the last event."""
        given = {**self.headers, "Last-Event-ID": self.cursor, "X-Request-Id": self.generation_id}
        async with _session() as session:
            request = session.post(f"{frontend.http}{self.path}", json={**STREAM, **self.body}, headers=given)
            await self._read(request, None)
        return self

    async def _read(self, request: Any, events_max: int | None) -> None:
        self.error = None
        try:
            async with request as response:
                if response.status != 200:
                    raise Refused(response.status, (await response.json())["error"], response.headers)
                self.generation_id = response.headers.get("X-Unbroken-Generation-Id", self.generation_id)
                self.seed = int(response.headers["X-Unbroken-Seed"]) if "X-Unbroken-Seed" in response.headers else None
                await self._read_events(response, events_max)
        except aiohttp.ClientError:
            assert not self.has_ended

    async def _read_events(self, response: aiohttp.ClientResponse, events_max: int | None) -> None:
        count, event_id, name = 0, "", ""
        while count != events_max and (line := (await response.content.readline()).decode()):
            field_name, _, value = line.rstrip("\n").partition(": ")
            if field_name == "id":
                event_id = value
            elif field_name == "event":
                name = value
            elif field_name == "data":
                self._take(value, event_id, name)
                count, event_id = count + 1, ""
        if count == events_max:
            reset(response)

    def _take(self, data: str, event_id: str, name: str) -> None:
        assert not self.has_ended, "an event after [DONE]"
        if data == "[DONE]":
            self.has_ended = True
            return
        event = json.loads(data)
        if name == "error":
            self.error = event["error"]
            return
        if event["choices"]:
            assert bool(event_id) == self.needs_ids
            assert not event_id or event_id not in self.ids, f"{event_id} came twice"
            self.ids += [event_id] if event_id else []
        self.usage = event["usage"] or self.usage
        for one in event["choices"]:
            self.choices.setdefault(one["index"], Kept()).take(one)


def reset(response: aiohttp.ClientResponse) -> None:
    """Cut the connection by RST, unless it has ended with the response."""
    transport = None if response.connection is None else response.connection.transport
    if transport is None:
        return
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()


async def whole_of(frontend: Frontend, generation_id: str) -> tuple[dict[int, Kept], Mapping[str, int]]:
    """Fetch an answer as one body. Raises Refused."""
    async with (
        _session() as session,
        session.get(f"{frontend.http}/v1/streams/{generation_id}", headers={"Accept": "application/json"}) as response,
    ):
        body = await response.json()
        if response.status != 200:
            raise Refused(response.status, body["error"], response.headers)
    choices: dict[int, Kept] = {}
    for one in body["choices"]:
        choices.setdefault(one["index"], Kept()).take(one)
    return choices, body["usage"]


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
