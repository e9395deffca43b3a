"""A gRPC client that needs nothing but the published proto file: `client.py HOST:PORT [HOST:PORT]`.

To generate the stubs beside this file, run in the folder that contains `proto/unbroken/v1/inference.proto`:

    python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. unbroken/v1/inference.proto

It prints a line of JSON for each step. With the addresses of two frontends, it only loses the first one: see resume.py.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from resume import generate
from unbroken.v1 import inference_pb2, inference_pb2_grpc

MODEL = "mocker"
FULL_MODEL = "full"
"""The only worker of this model runs one request at a time."""
TOKENS = 120
ENDLESS = 100_000
ENOUGH = 5
DEADLINE_S = 60.0
SHORT_DEADLINE_S = 2.0


class StreamIncomplete(Exception):
    """The stream broke a rule of inference.proto, so what was received is not the answer."""


def main() -> None:
    """Run each step once."""
    channels = [grpc.insecure_channel(address) for address in sys.argv[1:]]
    stub, *others = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
    if others:
        lost_frontend([stub, *others])
    else:
        report("stream", **read_answer(stub.Generate(build_request("stream"), timeout=DEADLINE_S)))
        cancel(stub)
        refusal(stub)
        deadline(stub)
        lost_worker(stub)
    for channel in channels:
        channel.close()


def build_request(name: str, model: str = MODEL, max_tokens: int = TOKENS) -> Any:
    """Return a request. `name` becomes its request id, which the logs show."""
    return inference_pb2.GenerateRequest(
        model=model,
        text="The moon",
        sampling=inference_pb2.Sampling(temperature=0.8, seed=7),
        stop=inference_pb2.Stop(max_tokens=max_tokens, ignore_eos=True),
        request_id=f"python-{name}",
    )


def deltas(responses: Iterable[Any]) -> Iterator[Any]:
    """Yield the deltas of a stream with one choice. Raises StreamIncomplete if the stream breaks a rule."""
    position, is_complete = 0, False
    for response in responses:
        if is_complete or response.HasField("delta") == response.complete_final:
            raise StreamIncomplete("an item must be either a delta or the final marker")
        is_complete = response.complete_final
        if is_complete:
            continue
        if response.delta.token_ids and response.delta.position != position:
            raise StreamIncomplete(f"position {response.delta.position} follows {position}")
        position += len(response.delta.token_ids)
        yield response.delta
    if not is_complete:
        raise StreamIncomplete("the stream was cut off")


def read_answer(responses: Iterable[Any], reports_begin: bool = False) -> dict[str, Any]:
    """Read a stream to its end and return the answer. With `reports_begin`, report when ENOUGH tokens have arrived."""
    answer: dict[str, Any] = {"token_ids": [], "text": "", "finish_reason": ""}
    for delta in deltas(responses):
        answer["token_ids"] += delta.token_ids
        answer["text"] += delta.text
        if delta.finish_reason:
            answer["finish_reason"] = finish_reason_name(delta.finish_reason)
        if reports_begin and len(answer["token_ids"]) >= ENOUGH:
            report("begun")
            reports_begin = False
    return answer


def finish_reason_name(number: int) -> str:
    """Return the name of a finish reason, or its number if a newer server sends one that this program does not know."""
    known = inference_pb2.FinishReason.DESCRIPTOR.values_by_number
    return known[number].name if number in known else str(number)


def cancel(stub: Any) -> None:
    """Cancel the rpc after some tokens. The worker stops within two steps."""
    call = stub.Generate(build_request("cancel", max_tokens=ENDLESS), timeout=DEADLINE_S)
    count = 0
    for delta in deltas(call):
        count += len(delta.token_ids)
        if count >= ENOUGH:
            break
    call.cancel()
    report("cancel", tokens=count, status=call.code().name)


def refusal(stub: Any) -> None:
    """Send a request while another stream holds the only slot. The refusal says why, and when to retry."""
    holder = stub.Generate(build_request("holder", FULL_MODEL, ENDLESS), timeout=DEADLINE_S)
    next(holder)
    try:
        read_answer(stub.Generate(build_request("refusal", FULL_MODEL), timeout=DEADLINE_S))
    except grpc.RpcError as error:
        report("refusal", status=error.code().name, **details(error))
    holder.cancel()


def details(error: grpc.RpcError) -> dict[str, Any]:
    """Return the status details: ErrorInfo, unless gRPC itself ended the rpc; RetryInfo, if a retry makes sense."""
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
    """Request more tokens than the deadline allows."""
    count = 0
    try:
        for delta in deltas(stub.Generate(build_request("deadline", max_tokens=ENDLESS), timeout=SHORT_DEADLINE_S)):
            count += len(delta.token_ids)
    except grpc.RpcError as error:
        report("deadline", tokens=count, status=error.code().name, **details(error))


def lost_worker(stub: Any) -> None:
    """The test that runs this program kills the worker when it reads `begun`. The client needs no code for that."""
    report(
        "lost_worker",
        **read_answer(stub.Generate(build_request("lost_worker"), timeout=DEADLINE_S), reports_begin=True),
    )


def lost_frontend(stubs: list[Any]) -> None:
    """The test that runs this program kills the first frontend when it reads `begun`."""
    request = build_request("lost_frontend")
    report("undisturbed", **read_answer(generate(stubs[1:], request, DEADLINE_S)))
    report("resumed", **read_answer(generate(stubs, request, DEADLINE_S), reports_begin=True))


def report(step: str, **fields: Any) -> None:
    """Print the result of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
