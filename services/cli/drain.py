"""`unbroken drain`: takes a worker out of service."""

from collections.abc import Sequence
from typing import Any

import click
import grpc

from services.cli.options import registry_option
from services.core.errors import Failure, Reason
from services.rpc.status import CHANNEL_OPTIONS, failure_of
from services.runtime.loop import run_on_loop
from services.stubs import registry_pb2, registry_pb2_grpc

DRAIN_TIMEOUT_S = 5.0


@click.command(
    short_help="Take a worker out of service: its streams move to other workers.",
    help="Take a worker out of service: its streams move to other workers without a pause. INSTANCE is the instance id"
    " in the worker's log line `worker ready`.",
)
@registry_option
@click.argument("instance")
def command(instance: str, **given: Any) -> None:
    try:
        drained = run_on_loop(_drain(given["registries"], instance))
    except Failure as failure:
        if failure.reason is Reason.CANNOT_CONNECT:
            raise click.ClickException(
                f"no registry answers: {failure.detail}; give its address with --registry"
            ) from None
        raise click.ClickException(". ".join(filter(None, (failure.detail, failure.traits.hint)))) from None
    click.echo(
        f"{drained.instance_id} at {drained.address} was asked to drain; it exits when its streams have ended or moved"
    )


async def _drain(registries: Sequence[str], instance_id: str) -> registry_pb2.Instance:
    """Ask one registry after another until one answers. Raises Failure."""
    failure = Failure(Reason.CANNOT_CONNECT, "no registry was asked")
    for address in registries:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            request = registry_pb2.DrainRequest(instance_id=instance_id)
            try:
                return (await stub.Drain(request, timeout=DRAIN_TIMEOUT_S)).instance
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error, otherwise=Reason.CANNOT_CONNECT)
                if failure.reason is Reason.INSTANCE_NOT_FOUND:
                    break
    raise failure
