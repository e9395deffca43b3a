"""An rpc that fails before its handler is called has one status, one reason, and is one outcome."""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hpack import Decoder

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import CAUSE, Failure, Reason, RefusedFor
from services.http.grpc.messages import INLINE_BYTES_MAX
from services.http.grpc.routes import GrpcRoutes
from services.http.h2.wire.frames import DATA, END_STREAM, frame
from services.http.server.config import HttpConfig
from services.rpc.status import DOMAIN
from tests.http.grpc.interop_service import SERVICE
from tests.http.grpc.support import (
    EMPTY_CALL,
    HEADERS,
    INPUT_CALL,
    UNARY_CALL,
    error_in,
    message,
    message_in,
    raw_client,
    serving_rpcs,
)
from tests.http.support import run

CONFIG = HttpConfig(body_bytes_max=100_000, body_read_s_max=0.05)
GZIP = {"grpc-encoding": "gzip"}


@dataclass
class Refused:
    """The outcomes that were counted."""

    seen: list[tuple[str, Reason]] = field(default_factory=list)

    def __call__(self, path: str, failure: Failure) -> None:
        self.seen.append((path, failure.reason))


@dataclass(frozen=True)
class Case:
    """`content`: of the request, without `ends` as much as comes of it."""

    code: grpc.StatusCode
    content: bytes = message(b"")
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: Reason = Reason.INVALID_ARGUMENT
    ends: bool = True


INTERNAL, INVALID = grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT
CASES = {
    "undecodable": Case(INVALID, message(b"\xff")),
    "timeout": Case(INVALID, headers={"grpc-timeout": "soon"}),
    "binary metadata": Case(INVALID, headers={"x-bin": "!"}),
    "encoding": Case(grpc.StatusCode.UNIMPLEMENTED, headers={"grpc-encoding": "snappy"}),
    "too large": Case(
        grpc.StatusCode.RESOURCE_EXHAUSTED, message(bytes(200_000)), reason=Reason.BODY_TOO_LARGE, ends=False
    ),
    "late": Case(grpc.StatusCode.DEADLINE_EXCEEDED, b"", reason=Reason.DEADLINE_EXCEEDED, ends=False),
    "flag": Case(INTERNAL, message(b"", flag=2)),
    "two messages": Case(INTERNAL, 2 * message(b"")),
    "no message": Case(INTERNAL, b""),
    "half a message": Case(INTERNAL, message(b"abc")[:-1]),
    "no gzip": Case(INTERNAL, message(b"no gzip", flag=1), GZIP),
    "two members": Case(INTERNAL, message(2 * gzip.compress(b""), flag=1), GZIP),
    "compressed in an unknown way": Case(INTERNAL, message(b"x", flag=1)),
}


def send(client: Any, path: str, case: Case) -> int:
    stream_id: int = client.open(path, {**HEADERS, **case.headers}, ends=False)
    pieces = [case.content[at : at + 16_384] for at in range(0, len(case.content), 16_384)]
    client.send(*(frame(DATA, 0, stream_id, piece) for piece in pieces))
    if case.ends:
        client.send(frame(DATA, END_STREAM, stream_id))
    return stream_id


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_refusal_has_its_reason_and_is_one_outcome(case: Case) -> None:
    refused = Refused()

    async def test() -> None:
        async with serving_rpcs(config=CONFIG, on_refused=refused) as serving, raw_client(serving) as client:
            answer = await client.answer(send(client, UNARY_CALL, case))

        info = error_in(answer.headers)
        assert answer.headers["grpc-status"] == str(case.code.value[0])
        assert (info.domain, info.reason) == (DOMAIN, case.reason)
        assert info.metadata["retryable"] == "false"

    run(test)
    assert refused.seen == [(UNARY_CALL, case.reason)]


def test_too_much_work_is_an_outcome() -> None:
    refused = Refused()

    async def test() -> None:
        async with serving_rpcs(on_refused=refused) as serving, raw_client(serving) as client:
            serving.routes.compression._executor = BoundedExecutor(places=0)
            content = message(gzip.compress(bytes(2 * INLINE_BYTES_MAX)), flag=1)
            answer = await client.answer(client.post(UNARY_CALL, content, HEADERS | GZIP))

        assert error_in(answer.headers).reason == Reason.OVERLOADED

    run(test)
    assert refused.seen == [(UNARY_CALL, Reason.OVERLOADED)]


def test_what_a_handler_does_is_not_refused() -> None:
    """It counts its outcomes itself."""
    refused = Refused()

    async def test() -> None:
        async with serving_rpcs(on_refused=refused) as serving, raw_client(serving) as client:

            async def fail(_: Any, context: Any) -> Any:
                raise Failure(Reason.NO_WORKERS, "as scripted")

            serving.routes.methods[UNARY_CALL].behaviour = fail
            failed = await client.answer(client.post(UNARY_CALL, message(b""), HEADERS))
            late = await client.answer(client.open(INPUT_CALL, HEADERS | {"grpc-timeout": "10m"}, ends=False))
            done = await client.answer(client.post(EMPTY_CALL, message(b""), HEADERS))
            broken = await client.answer(client.post(INPUT_CALL, b"\0", HEADERS))

        assert error_in(failed.headers).reason == Reason.NO_WORKERS
        assert error_in(late.headers).reason == Reason.DEADLINE_EXCEEDED
        assert done.trailers["grpc-status"] == "0"
        assert error_in(broken.headers).reason == Reason.INVALID_ARGUMENT

    run(test)
    assert refused.seen == []


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    """They are no outcome, as an unknown path over HTTP is none."""
    refused = Refused()

    async def test() -> None:
        async with serving_rpcs(on_refused=refused) as serving, raw_client(serving) as client:
            method = await client.answer(client.post(f"/{SERVICE}/Unknown", message(b""), HEADERS))
            service = await client.answer(client.post("/unknown.Service/EmptyCall", message(b""), HEADERS))
            verb = await client.answer(client.open(EMPTY_CALL, HEADERS, method="PUT", ends=True))
            path = await client.answer(client.get("/unknown"))

        hints = [error_in(answer.headers).metadata["hint"] for answer in (method, service)]
        assert hints[0].startswith(f"{SERVICE} has ")
        assert "EmptyCall" in hints[0]
        assert hints[1] == f"The gRPC services are {SERVICE}."
        assert message_in(verb.headers) == "an rpc is sent with POST, not PUT"
        assert path.json["error"]["hint"] == f"The gRPC services are {SERVICE}."

    run(test)
    assert refused.seen == []


def test_method_that_its_service_lacks_has_a_reason() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:

            async def lack(_: Any, context: Any) -> Any:
                """As generated code does."""
                context.set_code(grpc.StatusCode.UNIMPLEMENTED)
                context.set_details("Method not implemented!")
                raise NotImplementedError("Method not implemented!")

            serving.routes.methods[UNARY_CALL].behaviour = lack
            answer = await client.answer(client.post(UNARY_CALL, message(b""), HEADERS))

        assert error_in(answer.headers).reason == Reason.INVALID_ARGUMENT

    run(test)


def test_refused_connection_has_its_reason() -> None:
    """Its client, and the gRPC library of its client, may try again."""
    fields = {str(name): str(value) for name, value in Decoder().decode(GrpcRoutes().no_room())}

    info = error_in(fields)
    assert fields["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])
    assert (info.reason, info.metadata[CAUSE]) == (Reason.OVERLOADED, RefusedFor.CONNECTIONS)
    assert info.metadata["retryable"] == "true"
