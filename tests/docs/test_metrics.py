"""docs/metrics.md has a row for each metric that a frontend or a worker exposes, and for no other."""

import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.access.keys_watch import AccessConfig
from services.frontend.processes.metrics_merge import MergedMetrics, parsed
from services.frontend.processes.process_group import ProcessGroup
from services.frontend.server import Frontend, FrontendConfig
from services.tls.roles import Role
from services.worker.engines.mocker import MockerConfig, MockerEngine
from services.worker.server import Worker, WorkerConfig
from tests.docs.pages import text_of
from tests.support.doubles import run_async
from tests.tls.support import peer_files, shared_certificates

Row = tuple[str, str, tuple[str, ...]]
"""name, type, labels"""


def documented(section: str) -> list[Row]:
    """The rows of the table in a section."""
    text = text_of("docs/metrics.md").partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    return [(name.strip("`"), kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in lines]


def exposed(registry: CollectorRegistry) -> list[Row]:
    """What a registry would be scraped for, that included which has no series yet."""
    rows = []
    for collector in registry._collector_to_names:
        for metric in collector.collect():
            labels = getattr(metric, "_labelnames", getattr(collector, "_labelnames", ()))
            rows.append((metric.name + "_total" * (metric.type == "counter"), metric.type, tuple(labels)))
    return rows


async def of_frontend() -> CollectorRegistry:
    access = AccessConfig(keys_file=Path(os.devnull))
    return Frontend(FrontendConfig(tls=shared_certificates().pair(), access=access))._metrics.registry


async def of_processes() -> CollectorRegistry:
    """What a supervisor tells beside what its processes do, of which it has none here."""
    registry = CollectorRegistry()
    registry.register(MergedMetrics(parsed(await ProcessGroup("dynamo_frontend").exposition())))
    return registry


async def of_worker() -> CollectorRegistry:
    peers = peer_files(shared_certificates(), Role.WORKER)
    return Worker(MockerEngine(MockerConfig()), WorkerConfig(peers=peers))._metrics


@pytest.mark.parametrize(
    ("section", "registry"),
    [("Frontend", of_frontend), ("Several processes", of_processes), ("Worker", of_worker)],
)
def test_each_metric_has_its_row_and_each_row_its_metric(
    section: str, registry: Callable[[], Awaitable[CollectorRegistry]]
) -> None:
    async def scenario() -> list[Row]:
        return exposed(await registry())

    assert sorted(documented(section)) == sorted(run_async(scenario()))
