"""Reads an answer that outlives its connection and its frontend: copy this file.

The rules are those of "Coming back over gRPC" in docs/clients.md.
"""

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from unbroken.v1 import inference_pb2

KEPT = (("x-on-disconnect", "continue"),)
FAILURES_MAX = 10
"""So many attempts in a row may fail without an item."""
PAUSE_S = 0.1
PAUSE_S_MAX = 5.0
OWN = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Statuses that this client's own gRPC library sets if the client wants the end."""


def generate(stubs: Sequence[Any], request: Any, timeout_s: float) -> Iterator[Any]:
    """Yield the items of the answer, each once. Raises grpc.RpcError.

    `stubs`: of several frontends, of which the first one is asked first. `request`: gets a request_id of its own.
    """
    request.request_id = uuid4().hex
    give_up_at = time.monotonic() + timeout_s
    cursor, is_begun, is_complete, failures = "", False, False, 0
    index = 0
    while True:
        stub = stubs[index % len(stubs)]
        left_s = max(0.0, give_up_at - time.monotonic())
        if is_begun:
            resume = inference_pb2.ResumeRequest(generation_id=request.request_id, cursor=cursor)
            items = stub.Resume(resume, timeout=left_s)
        else:
            items = stub.Generate(request, timeout=left_s, metadata=KEPT)
        try:
            for item in items:
                cursor, is_complete, failures = item.cursor or cursor, item.complete_final, 0
                yield item
            return
        except grpc.RpcError as error:
            if is_complete:
                return
            is_unknown = is_begun and not cursor and error.code() is grpc.StatusCode.NOT_FOUND
            is_broken, at_least_s = judge(error)
            if failures == FAILURES_MAX or not (is_broken or is_unknown):
                raise
        failures += 1
        is_begun = not is_unknown
        if is_unknown:
            continue  # No frontend has begun with it: ask this one anew.
        index += 1
        if failures >= len(stubs):
            pause_s = random.uniform(0, min(PAUSE_S_MAX, PAUSE_S * 2 ** (failures - len(stubs))))
            time.sleep(min(max(pause_s, at_least_s), max(0.0, give_up_at - time.monotonic())))


def judge(error: grpc.RpcError) -> tuple[bool, float]:
    """Whether to come back after this failure, and how many seconds to wait at least."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    is_broken, at_least_s = error.code() not in OWN, 0.0  # Without ErrorInfo: the connection, or a proxy.
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            is_broken = info.metadata["retryable"] == "true"
        elif detail.Unpack(retry):
            at_least_s = retry.retry_delay.ToTimedelta().total_seconds()
    return is_broken, at_least_s
