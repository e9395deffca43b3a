"""A conversation with a model over the HTTP API, for people at a terminal."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 60.0
"""How long a stream may say nothing at all."""
EVENT_BYTES_MAX = 1024 * 1024
DONE: Final = "[DONE]"


class ChatError(Exception):
    """The server did not answer well: what it said and what to do, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """url: of a frontend. options: fields of every request beside the model and the messages."""

    url: str
    model: str | None = None
    system: str | None = None
    options: dict[str, Any]


class Conversation:
    """What was said so far. One `ask` at a time; an answer that was cut off stays in it as far as it came."""

    def __init__(self, config: ChatConfig) -> None:
        self._config = config
        self.model = config.model
        self.messages: list[dict[str, str]] = []
        if config.system is not None:
            self.messages.append({"role": "system", "content": config.system})

    async def find_model(self) -> str:
        """The model that answers: the given one, else the first that is served. Raises ChatError."""
        async with self._session() as session:
            return await self._model_on(session)

    async def ask(self, text: str, write: Callable[[str], object]) -> None:
        """Send `text` and give the answer to `write` as it comes. Raises ChatError; the question is then forgotten."""
        question = {"role": "user", "content": text}
        parts: list[str] = []

        def take(part: str) -> None:
            parts.append(part)
            write(part)

        try:
            await self._stream([*self.messages, question], take)
        finally:
            if parts:
                self.messages += [question, {"role": "assistant", "content": "".join(parts)}]

    async def _stream(self, messages: list[dict[str, str]], take: Callable[[str], None]) -> None:
        async with self._session() as session:
            body = {"model": await self._model_on(session), "messages": messages, "stream": True}
            async with session.post("/v1/chat/completions", json=body | self._config.options) as response:
                await _raise_for_error(response)
                await _read_events(response.content, take)

    async def _model_on(self, session: aiohttp.ClientSession) -> str:
        self.model = self.model or await _first_model(session)
        return self.model

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A session with the server; whatever goes wrong inside is a ChatError."""
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(
                self._config.url, timeout=timeout, read_bufsize=EVENT_BYTES_MAX
            ) as session:
                yield session
        except TimeoutError as error:
            raise ChatError(f"{self._config.url} says nothing for too long") from error
        except (aiohttp.ClientResponseError, aiohttp.ClientConnectionResetError) as error:
            # The second is for a server that speaks first: its connection is given up before the request is written.
            raise ChatError(
                f"{self._config.url} does not speak the HTTP API of a frontend: is it the gRPC port?"
            ) from error
        except aiohttp.ClientError as error:
            raise ChatError(
                f"cannot talk to {self._config.url}: {error}\nIs it up? `unbroken up` starts it."
            ) from error


async def _first_model(session: aiohttp.ClientSession) -> str:
    async with session.get("/v1/models") as response:
        await _raise_for_error(response)
        models = (await response.json())["data"]
    if not models:
        raise ChatError("no model is served at the moment")
    name: str = models[0]["id"]
    return name


async def _raise_for_error(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text()
    try:
        raise ChatError(_error_text(json.loads(text)))
    except json.JSONDecodeError:
        raise ChatError(f"status {response.status}: {text}") from None


async def _read_events(lines: aiohttp.StreamReader, take: Callable[[str], None]) -> None:
    """Read server-sent events to their end. Raises ChatError for an error event and for an end without `[DONE]`."""
    async for line in lines:
        field, _, data = line.decode().strip().partition(":")
        if field != "data":
            continue
        if (data := data.strip()) == DONE:
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(_error_text(event))
        for choice in event["choices"]:
            if part := choice["delta"].get("content"):
                take(part)
    raise ChatError("the stream ended before the answer did")


def _error_text(envelope: dict[str, Any]) -> str:
    """The message and the hint of an error envelope."""
    error = envelope["error"]
    return "\n".join(filter(None, (error["message"], error.get("hint"))))
