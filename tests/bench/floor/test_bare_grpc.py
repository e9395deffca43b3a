"""The bare gRPC server sends each token as a message of its own."""

import grpc

from bench.clients.requests import grpc_request
from bench.floor.bare_grpc import messages, serving_bare_grpc
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.support.clock import WAIT_S


def test_bare_server_sends_each_token_and_then_the_marker() -> None:
    with serving_bare_grpc(tokens=5, itl_ms=0.5) as (address, _), grpc.insecure_channel(address) as channel:
        items = list(inference_pb2_grpc.InferenceStub(channel).Generate(grpc_request(5), timeout=WAIT_S))

    assert [item.delta.position for item in items[:-1]] == [0, 1, 2, 3, 4]
    assert items[-1] == inference_pb2.GenerateResponse(complete_final=True)
    assert [item.SerializeToString() for item in items] == messages(5)
