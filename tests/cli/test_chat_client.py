"""The terminal chat: it keeps the conversation, shows what the server says of an error, and Ctrl-C stops an answer."""

import asyncio
import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

WAIT_S = 20.0
ENVELOPE = {"error": {"message": "no such model", "hint": "Ask for another."}}


def event(text: str) -> str:
    """An event that adds `text` to the answer."""
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


class Server:
    """Plays one script for each request, the last one again and again, and keeps what it was asked.

    A script is a list of frames to write; a number before them is a status with ENVELOPE as its body. HANG: nothing
    more comes until the client has gone.
    """

    HANG = "hang"

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.requests: list[dict[str, Any]] = []
        self.url = ""
        self.lost_clients = threading.Semaphore(0)
        self._listening = threading.Event()

    def __enter__(self) -> "Server":
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._listening.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._listening.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script[0], int):
            return web.json_response(ENVELOPE, status=script[0])
        response = web.StreamResponse()
        await response.prepare(request)
        for frame in script:
            if frame == self.HANG:
                await self._hang()
            await response.write(frame.encode())
        return response

    async def _hang(self) -> None:
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            self.lost_clients.release()


def chat(server: Server, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`unbroken chat` with `text` from a pipe."""
    command = [sys.executable, "-m", "services", "chat", f"--url={server.url}", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=WAIT_S, check=False)


# Makes standard input the controlling terminal, so that its Ctrl-C reaches the process, and becomes what its arguments
# say. In the child, and not between fork and exec: other threads of this process may hold locks there.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """`unbroken chat` on a terminal."""

    def __init__(self, server: Server) -> None:
        self._master, slave = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, "-m", "services", "chat", f"--url={server.url}"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until `text` comes, and forget what was up to there."""
        while text not in self.seen:
            assert select.select([self._master], [], [], WAIT_S)[0], f"{text!r} did not come after {self.seen!r}"
            self.seen += os.read(self._master, 4096).decode()
        self.seen = self.seen.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_text_from_a_pipe_is_answered_once() -> None:
    with Server([event("Hel"), event("lo"), "data: [DONE]\n\n"]) as server:
        done = chat(server, "Hi", "--system", "Be kind.", "--max-tokens", "5", "--seed", "7", "--temperature", "0")

    assert (done.returncode, done.stdout) == (0, "Hello\n")
    assert server.requests == [
        {
            "model": "first",
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "max_tokens": 5,
            "temperature": 0.0,
            "seed": 7,
        }
    ]


def test_an_error_shows_its_message_and_hint() -> None:
    with Server([404]) as server:
        done = chat(server, "Hi", "--model", "none")

    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", "error: no such model\nAsk for another.\n")


def test_an_error_in_the_stream_shows_after_what_came() -> None:
    with Server([event("Hel"), f"event: error\ndata: {json.dumps(ENVELOPE)}\n\n"]) as server:
        done = chat(server, "Hi")

    assert (done.returncode, done.stdout) == (1, "Hel\n")
    assert done.stderr.startswith("error: no such model")


def test_an_answer_that_is_cut_off_is_an_error() -> None:
    with Server([event("Hel")]) as server:
        done = chat(server, "Hi")

    assert done.returncode == 1
    assert "the stream ended before the answer did" in done.stderr


def test_a_server_that_is_not_there_is_an_error() -> None:
    server = Server([])
    server.url = "http://127.0.0.1:1"

    done = chat(server, "Hi")

    assert done.returncode == 1
    assert "`unbroken up` starts it" in done.stderr


def test_the_grpc_port_is_known_for_what_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server([])
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=_settings_of_http2, args=(listening,))
        thread.start()
        done = chat(server, "Hi")
        thread.join(WAIT_S)

    assert done.returncode == 1
    assert done.stderr == f"error: {server.url} does not speak the HTTP API of a frontend: is it the gRPC port?\n"


def _settings_of_http2(listening: socket.socket) -> None:
    """Take one connection, and say at once what an HTTP/2 server does."""
    connection, _ = listening.accept()
    with connection:
        connection.sendall(b"\0\0\0\x04\0\0\0\0\0")
        while connection.recv(4096):
            pass


@pytest.mark.parametrize(("text", "said"), [(b" \n", "has no message"), (b"\xff\xfe\0", "is not text in UTF-8")])
def test_what_is_no_message_is_not_sent(text: bytes, said: str) -> None:
    with Server([event("Hello"), "data: [DONE]\n\n"]) as server:
        command = [sys.executable, "-m", "services", "chat", f"--url={server.url}"]
        done = subprocess.run(command, input=text, capture_output=True, timeout=WAIT_S, check=False)

    assert done.returncode == 1
    assert done.stderr.decode().startswith("Error: standard input ")
    assert said in done.stderr.decode()
    assert server.requests == []


@pytest.mark.parametrize("url", ["localhost:8000", "http://", ""])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    server = Server([])
    server.url = url

    done = chat(server, "Hi")

    assert done.returncode == 2
    assert "is not like http://127.0.0.1:8000" in done.stderr


def test_the_conversation_is_kept_and_ctrl_d_ends_it(terminals: list[Terminal]) -> None:
    with Server([event("Hello"), "data: [DONE]\n\n"]) as server:
        terminals.append(terminal := Terminal(server))
        terminal.wait_for("This is first. Ctrl-C stops an answer, Ctrl-D leaves.")
        for text in ("one", "two", "three"):
            terminal.wait_for("> ")
            terminal.type(f"{text}\n")
            terminal.wait_for("Hello")
        terminal.wait_for("> ")
        terminal.type("\x04")

        assert terminal.process.wait(WAIT_S) == 0

    assert [turn["content"] for turn in server.requests[2]["messages"]] == ["one", "Hello", "two", "Hello", "three"]


def test_ctrl_c_stops_the_answer_and_not_the_conversation(terminals: list[Terminal]) -> None:
    with Server([event("Hel"), Server.HANG], [event("Bye"), "data: [DONE]\n\n"]) as server:
        terminals.append(terminal := Terminal(server))
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("Hel")
        terminal.type("\x03")
        assert server.lost_clients.acquire(timeout=WAIT_S), "the server was told"
        terminal.wait_for("> ")
        terminal.type("two\n")
        terminal.wait_for("Bye")

    assert [turn["content"] for turn in server.requests[1]["messages"]] == ["one", "Hel", "two"]
