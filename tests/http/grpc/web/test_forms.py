"""The forms of gRPC-Web: text is what binary is, in base64 that may be padded anywhere, and garbage has a status."""

import base64
from contextlib import suppress

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http.grpc.metadata import RpcError
from services.http.grpc.web.forms import PADDED_PIECES_MAX, Form, forms_of

BINARY, TEXT = Form(is_text=False), Form(is_text=True)


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_text_is_decoded_wherever_a_client_has_padded_it(pieces: list[bytes]) -> None:
    text = b"".join(base64.b64encode(piece) for piece in pieces)

    assert TEXT.decoded(text) == b"".join(pieces)


@given(st.binary(max_size=200))
def test_garbage_is_decoded_or_refused(text: bytes) -> None:
    with suppress(RpcError):
        decoded = TEXT.decoded(text)

        assert b"=" in text or base64.b64encode(decoded) == text


@pytest.mark.parametrize(
    "text", [b"A", b"AA", b"AAA", b"AAA?", b"=", b"AA=", b"AA==\n", b"A===", b"====", b"AAAA AAAA"]
)
def test_what_is_not_base64_is_refused(text: bytes) -> None:
    with pytest.raises(RpcError) as raised:
        TEXT.decoded(text)

    assert raised.value.code is grpc.StatusCode.INTERNAL


def test_pieces_of_text_are_bounded() -> None:
    assert len(TEXT.decoded(b"AA==" * PADDED_PIECES_MAX)) == PADDED_PIECES_MAX
    with pytest.raises(RpcError) as raised:
        TEXT.decoded(b"AA==" * (PADDED_PIECES_MAX + 1))

    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_binary_is_as_it_comes() -> None:
    assert BINARY.decoded(b"\0\xff=") == b"\0\xff="


def test_status_is_a_message_with_a_flag_of_its_own() -> None:
    status = BINARY.status(grpc.StatusCode.NOT_FOUND, "no\r\n☺", (("x-bin", b"\xff"), ("y", "z")))

    lines = b"grpc-status: 5\r\ngrpc-message: no%0D%0A%E2%98%BA\r\nx-bin: /w\r\ny: z\r\n"
    assert status == b"\x80" + len(lines).to_bytes(4, "big") + lines
    assert TEXT.status(grpc.StatusCode.OK, "", ()) == base64.b64encode(BINARY.status(grpc.StatusCode.OK, "", ()))


@pytest.mark.parametrize(
    ("content_type", "accept", "expected"),
    [
        ("application/grpc-web", None, (False, False)),
        ("application/grpc-web+proto", "*/*", (False, False)),
        ("Application/GRPC-Web; charset=utf-8", "application/grpc-web", (False, False)),
        ("application/grpc-web-text", None, (True, True)),
        ("application/grpc-web-text+proto", "application/grpc-web-text", (True, True)),
        ("application/grpc-web", "application/grpc-web-text", (False, True)),
        ("application/grpc-web-text", "application/grpc-web+proto", (True, False)),
        ("application/grpc-web+json", None, None),
        ("application/grpc-websocket", None, None),
        ("application/grpc", None, None),
        ("application/grpc+proto", None, None),
        ("application/json", None, None),
        (None, "application/grpc-web", None),
    ],
)
def test_forms_are_those_that_the_headers_name(
    content_type: str | None, accept: str | None, expected: tuple[bool, bool] | None
) -> None:
    given = {"content-type": content_type, "accept": accept}
    forms = forms_of({name: value for name, value in given.items() if value is not None})

    assert (None if forms is None else tuple(form.is_text for form in forms)) == expected
