"""A form of guided decoding that crashes its library, runs or allocates without end costs only its own request.

| workload | nemesis | checker |
| --- | --- | --- |
| a stream, and guided requests | hostile forms, gRPC, SSE and unary by turns | INVALID_ARGUMENT, no move |
| the same | the same | the stream equals the undisturbed one; the same process serves the next guided request |
"""

import asyncio
from dataclasses import replace
from itertools import cycle

import pytest

from services.core.request import Guided, GuidedKind
from tests.integration.conftest import Start
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, refusal
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.worker.guided.hostile import HOSTILE

pytestmark = pytest.mark.model

OPTIONS = ("--engine=llamacpp", "--model=smollm2", "--served-model-name=real", "--threads=1")
BESIDE = Request(protocol="stream", model="real", prompt="Once", max_tokens=120)
CHOICE = Guided(GuidedKind.CHOICE, ("yes", "no"))
NAMES = {
    "a multiple of a large number",
    "many optional letters",
    "many equal choices",
    "a grammar of many repeated classes",
    "a number that is none",
    "groups in groups",
}
"""Those of HOSTILE that end a helper in different ways. The others are tried in tests/worker/guided."""


@pytest.fixture(scope="module")
def real(start_plane: Start) -> tuple[Plane, Process]:
    plane = start_plane()
    return plane, asyncio.run(plane.worker(*OPTIONS))


def test_hostile_forms_are_refused_one_by_one_while_a_stream_goes_on(real: tuple[Plane, Process]) -> None:
    plane, worker = real
    protocols = cycle(PROTOCOLS)

    async def refuse_all() -> None:
        for name in sorted(NAMES):
            protocol = next(protocols)
            hostile = replace(BESIDE, protocol=protocol, guided=HOSTILE[name], ignore_eos=False)
            refused = await refusal(plane.frontend, hostile)
            assert refused is not None, name
            assert refused.reason == "INVALID_ARGUMENT", (name, refused)

    async def scenario() -> None:
        undisturbed = await answer(plane.frontend, BESIDE)
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(answer(plane.frontend, BESIDE))
            group.create_task(refuse_all())
        assert beside.result().text == undisturbed.text
        assert worker.status() is None
        for protocol in PROTOCOLS:
            guided = replace(BESIDE, protocol=protocol, guided=CHOICE, ignore_eos=False)
            assert (await answer(plane.frontend, guided)).text in CHOICE.texts
        assert await plane.frontend.metric("dynamo_frontend_model_migration_total") == 0

    asyncio.run(scenario())
