"""A session gives each call the tenant of its submit."""

import pytest
from google.protobuf.duration_pb2 import Duration

from services.core.errors import Reason
from services.core.tenant import EVERYBODY, Tenant
from services.rpc import codec
from services.rpc.codec import put_tenant, tenant_from_wire
from services.stubs import worker_pb2
from tests.support.manual_worker import ManualLayer, RawFrontend, Served, submit
from tests.worker.generations.sessions import kept_submit
from tests.worker.test_session import DONE, play


def wire(tenant: Tenant) -> worker_pb2.Tenant:
    message = worker_pb2.Tenant()
    put_tenant(message, tenant)
    return message


def submitted(asked: worker_pb2.Submit, tenant: Tenant | None) -> Tenant:
    """The tenant of the call for a submit with this tenant."""

    async def scenario(served: Served, pipeline: ManualLayer) -> Tenant:
        if tenant is not None:
            asked.tenant.CopyFrom(wire(tenant))
        frontend = served.attach()
        await frontend.send(asked)
        pending = await pipeline.wait_called(10)
        pending.ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(1))
        return pending.call.tenant

    found = play(scenario)
    assert isinstance(found, Tenant)
    return found


def test_call_has_the_tenant_of_its_submit() -> None:
    tenant = Tenant(name="a", weight=2.5, queue_timeout_s=1.5)

    assert submitted(submit(1, 10), tenant) == tenant


def test_call_of_a_kept_answer_has_the_tenant_of_its_submit() -> None:
    tenant = Tenant(name="a")

    assert submitted(kept_submit(1), tenant) == tenant


def test_submit_without_a_tenant_is_everybodys() -> None:
    assert submitted(submit(1, 10), None) is EVERYBODY


@pytest.mark.parametrize(
    ("param", "tenant"),
    [
        ("tenant.name", worker_pb2.Tenant(weight=1.0)),
        ("tenant.name", worker_pb2.Tenant(name="x" * 257, weight=1.0)),
        *(
            ("tenant.weight", worker_pb2.Tenant(name="a", weight=weight))
            for weight in (0.0, -1.0, float("nan"), float("inf"), 1e-7, 1e7)
        ),
        ("tenant.queue_timeout", worker_pb2.Tenant(name="a", weight=1.0, queue_timeout=Duration(seconds=-1))),
    ],
)
def test_tenant_that_cannot_be_served_fails_its_stream_alone(param: str, tenant: worker_pb2.Tenant) -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> RawFrontend:
        bad = submit(1, 10)
        bad.tenant.CopyFrom(tenant)
        frontend = served.attach()
        await frontend.send(bad, submit(2, 20))
        (await pipeline.wait_called(20)).ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(1) and frontend.end(2))
        return frontend

    frontend = play(scenario)

    refused, served = frontend.end(1), frontend.end(2)
    assert refused is not None
    assert (refused.error.reason, refused.error.param) == (Reason.INVALID_ARGUMENT, param)
    assert served is not None
    assert served.complete_final


def test_tenant_is_built_once_for_all_its_requests() -> None:
    tenant = Tenant(name="built once", queue_timeout_s=3.0)

    assert tenant_from_wire(wire(tenant)) is tenant_from_wire(wire(tenant))
    assert tenant_from_wire(wire(Tenant(name="built once", weight=2.0))).weight == 2.0
    assert codec._tenant.cache_info().maxsize == codec.TENANTS_KEPT
