"""The bare HTTP/2 server sends each token as a message of its own, to any client of gRPC."""

import grpc

from bench.clients.requests import grpc_request
from bench.floor.bare_grpc import messages
from bench.floor.bare_h2 import serving_bare_h2
from services.stubs import inference_pb2_grpc
from tests.support.clock import WAIT_S


def test_bare_server_sends_each_token_and_then_the_marker() -> None:
    with serving_bare_h2(tokens=5, itl_ms=0.5) as (address, _), grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answers = [list(stub.Generate(grpc_request(5), timeout=WAIT_S)) for _ in range(2)]

    assert [[item.SerializeToString() for item in items] for items in answers] == [messages(5)] * 2
