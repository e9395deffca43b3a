"""WorkerMetrics: what each tenant has had and has waiting, with a bounded number of labels."""

import asyncio
from collections.abc import Mapping

import pytest

from services.core.tenant import Tenant
from services.worker.dispatcher import Limits
from services.worker.execute import Execute
from tests.support.clock import run_clocked, settle
from tests.support.doubles import call_layer, make_request
from tests.support.manual_worker import ManualEngine
from tests.worker.test_metrics import metrics_of, scraped


def seen(*tenants: str) -> Mapping[str, float]:
    """The metrics after a request of each tenant, in turn: the first one runs and has two tokens, the others wait."""

    async def scenario() -> Mapping[str, float]:
        engine = ManualEngine()
        execute = Execute(engine, Limits(slots=1, places=9))
        engine.attach(execute.emit)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(call_layer(execute, make_request((1, 2, 3)), tenant=Tenant(name=name)))
                for name in tenants
            ]
            await settle()
            engine.give(engine.key_of((1, 2, 3)), [7, 8])
            found = scraped(metrics_of(execute, engine))
            for task in tasks:
                task.cancel()
        return {name: value for name, value in found.items() if name.startswith("unbroken_tenant")}

    return run_clocked(scenario())


def test_tokens_and_waiting_requests_are_counted_by_tenant() -> None:
    assert seen("a", "b", "b") == {
        'unbroken_tenant_service_tokens_total{kind="input",tenant="a"}': 3,
        'unbroken_tenant_service_tokens_total{kind="output",tenant="a"}': 2,
        'unbroken_tenant_service_tokens_total{kind="input",tenant="b"}': 0,
        'unbroken_tenant_service_tokens_total{kind="output",tenant="b"}': 0,
        'unbroken_tenant_waiting{tenant="a"}': 0,
        'unbroken_tenant_waiting{tenant="b"}': 2,
    }


def test_tenants_beyond_the_bound_share_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.core.tenant.LABELS_MAX", 2)

    found = seen("a", "b", "c", "d")

    assert {name: value for name, value in found.items() if "waiting" in name} == {
        'unbroken_tenant_waiting{tenant="a"}': 0,
        'unbroken_tenant_waiting{tenant="b"}': 1,
        'unbroken_tenant_waiting{tenant="(other)"}': 2,
    }
