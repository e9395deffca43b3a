"""`unbroken drain`: takes a worker out of service."""

from collections.abc import Sequence
from typing import Any

import click
import grpc

from services.cli.certs.options import peer_files, peer_options
from services.cli.options import registry_option
from services.core.errors import Failure, Reason
from services.rpc.secure.channels import open_channel, why_refused
from services.rpc.status import failure_of
from services.runtime.loop import run_on_loop
from services.stubs import registry_pb2, registry_pb2_grpc
from services.tls.certificate import CertificateError
from services.tls.peers import Peers, peers_with
from services.tls.roles import Role

DRAIN_TIMEOUT_S = 5.0


@click.command(
    short_help="Take a worker out of service: its streams move to other workers.",
    help="Take a worker out of service: its streams move to other workers without a pause. INSTANCE is the instance id"
    " in the worker's log line `worker ready`.",
)
@registry_option
@peer_options(Role.OPERATOR)
@click.argument("instance")
def command(instance: str, **given: Any) -> None:
    try:
        files = peer_files(given)
        peers = peers_with(files, Role.OPERATOR)
        drained = run_on_loop(_drain(given["registries"], instance, peers))
    except CertificateError as error:
        raise click.ClickException(str(error)) from error
    except Failure as failure:
        if failure.reason is Reason.CANNOT_CONNECT:
            raise click.ClickException(
                f"no registry answers: {failure.detail}; give its address with --registry"
            ) from None
        raise click.ClickException(". ".join(filter(None, (failure.detail, failure.traits.hint)))) from None
    click.echo(
        f"{drained.instance_id} at {drained.address} was asked to drain; it exits when its streams have ended or moved"
    )


async def _drain(registries: Sequence[str], instance_id: str, peers: Peers | None) -> registry_pb2.Instance:
    """Ask one registry after another until one answers. Raises Failure."""
    failure = Failure(Reason.CANNOT_CONNECT, "no registry was asked")
    for address in registries:
        async with open_channel(address, peers, Role.REGISTRY) as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            request = registry_pb2.DrainRequest(instance_id=instance_id)
            try:
                return (await stub.Drain(request, timeout=DRAIN_TIMEOUT_S)).instance
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error, otherwise=Reason.CANNOT_CONNECT)
                if failure.reason is Reason.CANNOT_CONNECT:
                    failure = Failure(Reason.CANNOT_CONNECT, why_refused(error, Role.REGISTRY))
                if failure.reason is Reason.INSTANCE_NOT_FOUND:
                    break
    raise failure
