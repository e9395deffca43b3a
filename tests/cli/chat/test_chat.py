"""`unbroken chat` answers a message from a pipe, holds a conversation in a terminal, and says why a request failed."""

import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.support.chat_server import DONE, ERROR_BODY, Server, chat, event
from tests.support.clock import WAIT_S

# Makes standard input the controlling terminal, so that Ctrl-C in it reaches the process, and executes its arguments.
# Resets SIGINT, which a shell ignores for commands that it starts in the background.
# Done in the child rather than between fork and exec, because other threads of this process may hold locks there.
_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
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
        """Read until `text` arrives, and discard everything up to it."""
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


def test_text_from_a_pipe_is_sent_as_one_message() -> None:
    with Server([event("Hel"), event("lo"), DONE]) as server:
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


@pytest.mark.parametrize(("text", "said"), [(b" \n", "is empty"), (b"\xff\xfe\0", "is not valid UTF-8")])
def test_standard_input_without_a_message_is_refused(text: bytes, said: str) -> None:
    with Server([event("Hello"), DONE]) as server:
        command = [sys.executable, "-m", "services", "chat", f"--url={server.url}"]
        done = subprocess.run(command, input=text, capture_output=True, timeout=WAIT_S, check=False)

    assert done.returncode == 1
    assert done.stderr.decode().startswith("Error: standard input ")
    assert said in done.stderr.decode()
    assert server.requests == []


@pytest.mark.parametrize("url", ["localhost:8000", "http://", ""])
def test_invalid_url_is_refused(url: str) -> None:
    server = Server([])
    server.url = url

    done = chat(server, "Hi")

    assert done.returncode == 2
    assert "is not a URL such as http://127.0.0.1:8000" in done.stderr


def test_each_request_contains_the_conversation_so_far_and_ctrl_d_ends_it(terminals: list[Terminal]) -> None:
    with Server([event("Hello"), DONE]) as server:
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


def test_ctrl_c_stops_the_answer_but_not_the_conversation(terminals: list[Terminal]) -> None:
    with Server([event("Hel"), Server.HANG], [event("Bye"), DONE]) as server:
        terminals.append(terminal := Terminal(server))
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("Hel")
        terminal.type("\x03")
        assert server.lost_clients.acquire(timeout=WAIT_S), "the server's handler was cancelled"
        terminal.wait_for("> ")
        terminal.type("two\n")
        terminal.wait_for("Bye")

    assert [turn["content"] for turn in server.requests[1]["messages"]] == ["one", "Hel", "two"]


def test_api_key_is_sent_as_the_openai_sdks_send_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server([event("Hello"), DONE]) as server:
        assert chat(server, "Hi", "--api-key", "the-key").returncode == 0
        assert chat(server, "Hi").returncode == 0
        monkeypatch.setenv("DYN_CHAT_API_KEY", "of-the-variable")
        assert chat(server, "Hi").returncode == 0

    assert server.authorizations == ["Bearer the-key", None, "Bearer of-the-variable"]


def test_error_response_is_shown_with_its_message_and_hint() -> None:
    with Server([404]) as server:
        done = chat(server, "Hi", "--model", "none")

    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", "error: no such model\nAsk for another.\n")


def test_error_in_the_stream_is_shown_after_the_text_that_arrived() -> None:
    with Server([event("Hel"), f"event: error\ndata: {json.dumps(ERROR_BODY)}\n\n"]) as server:
        done = chat(server, "Hi")

    assert (done.returncode, done.stdout) == (1, "Hel\n")
    assert done.stderr.startswith("error: no such model")


def test_stream_that_ends_without_a_done_event_is_an_error() -> None:
    with Server([event("Hel")]) as server:
        done = chat(server, "Hi")

    assert done.returncode == 1
    assert "the stream ended before the answer was complete" in done.stderr


def test_unreachable_server_is_an_error_with_a_hint() -> None:
    server = Server([])
    server.url = "http://127.0.0.1:1"

    done = chat(server, "Hi")

    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot connect to http://127.0.0.1:1: Connection refused\n")
    assert "`unbroken up` starts it" in done.stderr


def test_server_that_speaks_http_2_alone_is_recognized() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server([])
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=_serve_http2_settings, args=(listening,))
        thread.start()
        done = chat(server, "Hi")
        thread.join(WAIT_S)

    assert done.returncode == 1
    assert done.stderr == f"error: {server.url} does not speak the HTTP API of a frontend\n"


def _serve_http2_settings(listening: socket.socket) -> None:
    """Accept one connection, and send the first frame of an HTTP/2 server at once."""
    connection, _ = listening.accept()
    with connection:
        connection.sendall(b"\0\0\0\x04\0\0\0\0\0")
        while connection.recv(4096):
            pass
