"""A conversation with a model over the HTTP API, for people at a terminal."""

import json
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 60.0
"""How long a stream may send nothing."""
EVENT_BYTES_MAX = 1024 * 1024
DONE: Final = "[DONE]"


class ChatError(Exception):
    """The request failed. The message says why and what to do, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Configuration of a conversation.

    url: of a frontend. api_key: a tenant's, where clients need one. ca: PEM file of the CA of the frontend's
    certificate; None: those that the system trusts.
    options: fields of every request, besides the model and the messages.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    ca: Path | None = None
    system: str | None = None
    options: dict[str, Any]


class Conversation:
    """The messages so far. Run one `ask` at a time. An answer that was cut off is kept as far as it arrived."""

    def __init__(self, config: ChatConfig) -> None:
        self._config = config
        self.model = config.model
        self.messages: list[dict[str, str]] = []
        if config.system is not None:
            self.messages.append({"role": "system", "content": config.system})

    async def find_model(self) -> str:
        """The name of the model: the configured one, or the first that is served. Raises ChatError."""
        async with self._session() as session:
            return await self._model_on(session)

    async def ask(self, text: str, write: Callable[[str], object]) -> None:
        """Send `text` and pass the answer to `write` as it arrives. Raises ChatError.

        A question that got no part of an answer is not kept.
        """
        question = {"role": "user", "content": text}
        parts: list[str] = []

        def on_part(part: str) -> None:
            parts.append(part)
            write(part)

        try:
            await self._stream([*self.messages, question], on_part)
        finally:
            if parts:
                self.messages += [question, {"role": "assistant", "content": "".join(parts)}]

    async def _stream(self, messages: list[dict[str, str]], on_part: Callable[[str], None]) -> None:
        async with self._session() as session:
            body = {"model": await self._model_on(session), "messages": messages, "stream": True}
            async with session.post("/v1/chat/completions", json=body | self._config.options) as response:
                await _raise_for_error(response)
                await _read_events(response.content, on_part)

    async def _model_on(self, session: aiohttp.ClientSession) -> str:
        self.model = self.model or await _first_model(session)
        return self.model

    def _headers(self) -> dict[str, str]:
        return {} if self._config.api_key is None else {"Authorization": f"Bearer {self._config.api_key}"}

    def _tls(self) -> ssl.SSLContext | bool:
        """How certificates are verified. Raises ChatError."""
        if self._config.ca is None:
            return True
        try:
            return ssl.create_default_context(cafile=str(self._config.ca))
        except OSError as error:  # SSLError is one.
            raise ChatError(f"--ca {self._config.ca} cannot be read as PEM: {error}") from error

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """An HTTP session with the server, which turns every error into a ChatError."""
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(
                self._config.url,
                headers=self._headers(),
                timeout=timeout,
                read_bufsize=EVENT_BYTES_MAX,
                connector=aiohttp.TCPConnector(ssl=self._tls()),
            ) as session:
                yield session
        except aiohttp.ClientConnectorCertificateError as error:
            raise ChatError(
                f"the certificate of {self._config.url} is not accepted: {_unverified(error.certificate_error)}\n"
                "Give the CA that has made it with --ca."
            ) from error
        except TimeoutError as error:
            raise ChatError(f"{self._config.url} does not answer in time") from error
        except (aiohttp.ClientResponseError, aiohttp.ClientConnectionResetError) as error:
            # The second: if the server sends first, aiohttp closes the connection before it writes the request.
            raise ChatError(f"{self._config.url} does not speak the HTTP API of a frontend") from error
        except aiohttp.ClientError as error:
            raise ChatError(
                f"cannot connect to {self._config.url}: {_why_not(error)}\nIs it running? `unbroken up` starts it."
                f"{_proxy_hint(self._config.url)}"
            ) from error


def _proxy_hint(url: str) -> str:
    """A note for people whose environment names a proxy for this URL: this client connects directly."""
    place = urlsplit(url)
    if place.scheme not in getproxies() or proxy_bypass(place.netloc):
        return ""
    return f"\nThe proxy in {place.scheme}_proxy is not used: the connection is direct."


def _unverified(error: Exception) -> str:
    return error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)


def _why_not(error: aiohttp.ClientError) -> object:
    """Why a connection failed, without aiohttp's details. A failed name lookup has a negative error number."""
    if not isinstance(error, aiohttp.ClientConnectorError):
        return error
    if error.errno is None or error.errno < 0:
        return error.strerror
    return os.strerror(error.errno)


async def _first_model(session: aiohttp.ClientSession) -> str:
    async with session.get("/v1/models") as response:
        await _raise_for_error(response)
        models = (await response.json())["data"]
    if not models:
        raise ChatError("no model is served at present")
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


async def _read_events(lines: aiohttp.StreamReader, on_part: Callable[[str], None]) -> None:
    """Read server-sent events until `[DONE]`. Raises ChatError on an error event or if the stream ends without it."""
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
                on_part(part)
    raise ChatError("the stream ended before the answer was complete")


def _error_text(envelope: dict[str, Any]) -> str:
    """The message and the hint of an error body."""
    error = envelope["error"]
    return "\n".join(filter(None, (error["message"], error.get("hint"))))
