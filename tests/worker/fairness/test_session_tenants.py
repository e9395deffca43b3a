"""A session gives each call the tenant of its submit."""

import pytest
from google.protobuf.duration_pb2 import Duration

from services.core.common_layers import Guard
from services.core.errors import Reason
from services.core.request import FinishReason
from services.core.tenant import EVERYBODY, Tenant
from services.rpc import codec
from services.rpc.codec import put_tenant, tenant_from_wire
from services.stubs import worker_pb2
from services.worker.dispatcher import Limits
from services.worker.execute import Execute
from tests.support.doubles import run_async
from tests.support.manual_worker import ManualEngine, ManualLayer, RawFrontend, Served, serving, submit
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


def test_stream_that_gives_way_ends_with_its_cause_and_the_others_go_on() -> None:
    """One frontend has the slot and both places for `a`; the newest of these gives way to `b` of another frontend."""

    async def scenario() -> tuple[RawFrontend, RawFrontend, tuple[int, int]]:
        engine = ManualEngine()
        execute = Execute(engine, Limits(slots=1, places=2))
        engine.attach(execute.emit)
        async with serving(Guard(execute), engine=engine, execute=execute) as served:
            heavy, light = served.attach(), served.attach()
            await heavy.send(*(of(Tenant(name="a"), submit(number, 10 + number)) for number in (1, 2, 3)))
            await heavy.until(lambda: heavy.begun() == [1])
            await light.send(of(Tenant(name="b"), submit(1, 20)))
            await heavy.until(lambda: heavy.end(3))
            counts = served.load()
            engine.give(engine.key_of((11,)), [7], FinishReason.STOP)
            await heavy.until(lambda: heavy.end(1))
            return heavy, light, counts

    heavy, light, counts = run_async(scenario())

    end = heavy.end(3)
    assert end is not None
    assert (end.error.reason, end.error.metadata["cause"]) == (Reason.WORKER_AT_CAPACITY, "tenant_share")
    assert counts == (1, 2)
    assert heavy.token_ids(1) == [7]
    assert (heavy.end(2), light.end(1)) == (None, None)


def of(tenant: Tenant, asked: worker_pb2.Submit) -> worker_pb2.Submit:
    asked.tenant.CopyFrom(wire(tenant))
    return asked
