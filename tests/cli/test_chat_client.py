"""Conversation reports every failure of the server with a reason and a hint."""

import json
import socket
import threading

from tests.support.chat_server import ERROR_BODY, WAIT_S, Server, chat, event


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


def test_url_of_the_grpc_port_is_recognized() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server([])
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=_serve_http2_settings, args=(listening,))
        thread.start()
        done = chat(server, "Hi")
        thread.join(WAIT_S)

    assert done.returncode == 1
    assert done.stderr == f"error: {server.url} does not speak the HTTP API of a frontend: is it the gRPC port?\n"


def _serve_http2_settings(listening: socket.socket) -> None:
    """Accept one connection, and send the first frame of an HTTP/2 server at once."""
    connection, _ = listening.accept()
    with connection:
        connection.sendall(b"\0\0\0\x04\0\0\0\0\0")
        while connection.recv(4096):
            pass
