"""A client made of nothing but the published proto files: `client.py HOST:PORT`.

Stubs, from the folder that has `unbroken/v1/inference.proto`, into the one that has this file:

    python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. unbroken/v1/inference.proto

It prints a line of JSON for each thing that it tries.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from unbroken.v1 import inference_pb2, inference_pb2_grpc

MODEL = "mocker"
FULL_MODEL = "full"
"""Its only worker takes one request at a time."""
TOKENS = 120
ENDLESS = 100_000
ENOUGH = 5
DEADLINE_S = 60.0
SHORT_DEADLINE_S = 2.0


class StreamIncomplete(Exception):
    """The stream broke a rule of inference.proto: what came is not the answer."""


def main() -> None:
    """Try everything once."""
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        tell("stream", **whole(stub.Generate(asked("stream"), timeout=DEADLINE_S)))
        cancel(stub)
        refusal(stub)
        deadline(stub)
        lost_worker(stub)


def asked(name: str, model: str = MODEL, max_tokens: int = TOKENS) -> Any:
    """A request; `name` is for the logs."""
    return inference_pb2.GenerateRequest(
        model=model,
        text="The moon",
        sampling=inference_pb2.Sampling(temperature=0.8, seed=7),
        stop=inference_pb2.Stop(max_tokens=max_tokens, ignore_eos=True),
        request_id=f"python-{name}",
    )


def deltas(responses: Iterable[Any]) -> Iterator[Any]:
    """The deltas of a stream with one choice. Raises StreamIncomplete if it breaks a rule."""
    position, is_complete = 0, False
    for response in responses:
        if is_complete or response.HasField("delta") == response.complete_final:
            raise StreamIncomplete("an item is either a delta or the last")
        is_complete = response.complete_final
        if is_complete:
            continue
        if response.delta.token_ids and response.delta.position != position:
            raise StreamIncomplete(f"position {response.delta.position} follows {position}")
        position += len(response.delta.token_ids)
        yield response.delta
    if not is_complete:
        raise StreamIncomplete("the stream was cut off")


def whole(responses: Iterable[Any], is_begun_told: bool = False) -> dict[str, Any]:
    """The answer of a stream. With `is_begun_told` a line is printed when ENOUGH tokens of it are there."""
    answer: dict[str, Any] = {"token_ids": [], "text": "", "finish_reason": ""}
    for delta in deltas(responses):
        answer["token_ids"] += delta.token_ids
        answer["text"] += delta.text
        if delta.finish_reason:
            answer["finish_reason"] = finish_reason_name(delta.finish_reason)
        if is_begun_told and len(answer["token_ids"]) >= ENOUGH:
            tell("begun")
            is_begun_told = False
    return answer


def finish_reason_name(number: int) -> str:
    """Of one that a later server has and this program does not know: its number."""
    known = inference_pb2.FinishReason.DESCRIPTOR.values_by_number
    return known[number].name if number in known else str(number)


def cancel(stub: Any) -> None:
    """Leave after some tokens; the worker stops within two steps."""
    call = stub.Generate(asked("cancel", max_tokens=ENDLESS), timeout=DEADLINE_S)
    count = 0
    for delta in deltas(call):
        count += len(delta.token_ids)
        if count >= ENOUGH:
            break
    call.cancel()
    tell("cancel", tokens=count, status=call.code().name)


def refusal(stub: Any) -> None:
    """While one stream has all the room there is, another is refused: why, and when to come back."""
    holder = stub.Generate(asked("holder", FULL_MODEL, ENDLESS), timeout=DEADLINE_S)
    next(holder)
    try:
        whole(stub.Generate(asked("refusal", FULL_MODEL), timeout=DEADLINE_S))
    except grpc.RpcError as error:
        tell("refusal", status=error.code().name, **details(error))
    holder.cancel()


def details(error: grpc.RpcError) -> dict[str, Any]:
    """What a status carries: ErrorInfo, unless gRPC itself ended the rpc; RetryInfo where it is known when to retry."""
    found: dict[str, Any] = {}
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            found |= {"reason": info.reason, "domain": info.domain, "metadata": dict(info.metadata)}
        elif detail.Unpack(retry):
            found["retry_after_s"] = retry.retry_delay.ToTimedelta().total_seconds()
    return found


def deadline(stub: Any) -> None:
    """Ask more than there is time for."""
    count = 0
    try:
        for delta in deltas(stub.Generate(asked("deadline", max_tokens=ENDLESS), timeout=SHORT_DEADLINE_S)):
            count += len(delta.token_ids)
    except grpc.RpcError as error:
        tell("deadline", tokens=count, status=error.code().name, **details(error))


def lost_worker(stub: Any) -> None:
    """Whoever starts this kills the worker once it reads `begun`. Nothing here knows of it."""
    tell("lost_worker", **whole(stub.Generate(asked("lost_worker"), timeout=DEADLINE_S), is_begun_told=True))


def tell(step: str, **fields: Any) -> None:
    """Print what came of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
