"""A client that cannot come back is told why, by the status and the reason.

| workload | checker |
| --- | --- |
| an unknown id; a malformed one; a malformed cursor | 404; 400 with the name of the field |
| a cursor whose tokens are not those of the answer, or of another number of choices | 409 RESUME_DIVERGED |
| a cursor beyond the end | 416 |
| an answer past its grace: see test_detached.py | 410 |
| a frontend without a registry; one that cannot reach the worker | 503, which may be retried |
"""

import asyncio
from typing import Any

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.returning import ReturningClient
from tests.integration.harness.plane.plane import Plane
from tests.integration.resume.conftest import PLAIN

UNKNOWN = "0" * 32


@pytest.fixture(scope="module")
def plane(start_plane: Start) -> Plane:
    plane = start_plane()
    asyncio.run(plane.worker("--mocker-itl-ms=1"))
    return plane


@pytest.fixture(scope="module")
def client(plane: Plane) -> ReturningClient:
    """A client that had a part of an answer, which has ended meanwhile."""
    return asyncio.run(ReturningClient(PLAIN).ask(plane.frontend, events_max=9))


def refusal(client: ReturningClient, plane: Plane, **headers: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        asyncio.run(client.twin().come_back(plane.frontend, **headers))
    return refused.value


def test_unknown_id_is_not_found(plane: Plane) -> None:
    refused = refusal(ReturningClient(PLAIN, generation_id=UNKNOWN), plane)

    assert (refused.code, refused.reason, refused.error["retryable"]) == (404, "STREAM_NOT_FOUND", False)


@pytest.mark.parametrize("given", ["1", "g" * 32, UNKNOWN + "0", "chatcmpl-1", "r-" + UNKNOWN])
def test_malformed_id_is_invalid(plane: Plane, given: str) -> None:
    refused = refusal(ReturningClient(PLAIN, generation_id=given), plane)

    assert (refused.code, refused.reason, refused.error["param"]) == (400, "INVALID_ARGUMENT", "id")


@pytest.mark.parametrize("given", ["1", "-", "1-", "1-0", "1-0000000g", "1..2-00000000", "-1-00000000", "9" * 6000])
def test_malformed_cursor_is_invalid(plane: Plane, client: ReturningClient, given: str) -> None:
    refused = refusal(client, plane, **{"Last-Event-ID": given})

    assert (refused.code, refused.reason, refused.error["param"]) == (400, "INVALID_ARGUMENT", "Last-Event-ID")


@pytest.mark.parametrize("given", ["9-00000000", "64e-00000000", "9.9-00000000", "0-00000001"])
def test_cursor_of_another_answer_is_refused(plane: Plane, client: ReturningClient, given: str) -> None:
    refused = refusal(client, plane, **{"Last-Event-ID": given})

    assert (refused.code, refused.reason, refused.error["retryable"]) == (409, "RESUME_DIVERGED", False)


@pytest.mark.parametrize("given", ["65-00000000", "999e-00000000"])
def test_cursor_beyond_the_end_is_refused(plane: Plane, client: ReturningClient, given: str) -> None:
    refused = refusal(client, plane, **{"Last-Event-ID": given})

    assert (refused.code, refused.reason, refused.error["retryable"]) == (416, "CURSOR_BEYOND_END", False)


@pytest.mark.parametrize("form", ["cmpl-{}", "chatcmpl-{}", "{}"])
def test_refused_client_can_still_come_back_with_its_true_cursor(
    plane: Plane, client: ReturningClient, form: str
) -> None:
    returned = client.twin()
    returned.generation_id = form.format(client.generation_id)

    asyncio.run(returned.come_back(plane.frontend))

    assert returned.has_ended


def test_frontend_that_knows_no_workers_yet_asks_to_try_again(start_plane: Start) -> None:
    plane = start_plane()
    plane.registry.kill()
    late = plane.start_frontend()

    with pytest.raises(Refused) as refused:
        asyncio.run(ReturningClient(PLAIN, generation_id=UNKNOWN).come_back(late))

    assert (refused.value.code, refused.value.reason) == (503, "NO_WORKERS")
    assert refused.value.error["retryable"]


def test_frontend_that_cannot_reach_a_worker_asks_to_try_again(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> Refused:
        worker = await plane.worker("--lease=60")
        worker.kill()
        await plane.frontend.logged("worker lost")
        with pytest.raises(Refused) as refused:
            await ReturningClient(PLAIN, generation_id=UNKNOWN).come_back(plane.frontend)
        return refused.value

    refused = asyncio.run(scenario())

    assert (refused.code, refused.reason, refused.error["retryable"]) == (503, "NO_WORKERS", True)
