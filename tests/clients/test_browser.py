"""An EventSource in Chromium gets each token once and stops by itself, whatever happens on the way.

| nemesis | checker |
| --- | --- |
| RST in the head of a response, and in and between events | it comes back after `retry:`, with the last `id:` |
| its frontend is killed, and another one takes its address, or its place behind a proxy | the same |
| a balancer refuses with 503 | it stops, and the page's next one gets the answer from its beginning |
| the answer ends, is cancelled, or is read by another one | it stops, also if the page does not close it |
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.clients.conftest import need
from tests.clients.support.cluster import Cluster
from tests.clients.support.programs import Nemesis, Reported, steps
from tests.clients.support.proxy import Proxy
from tests.clients.support.toolchains import BROWSER
from tests.docs.pages import blocks
from tests.integration.harness.clients.returning import STREAM, ReturningClient
from tests.integration.harness.plane.processes import Frontend

PAGES = "--cors-allow-origin=*"
TOKENS = 200
RETRY_S = 1.0
DEFAULT_RETRY_S = 3.0
"""What Chromium waits if nobody tells it a time."""
QUESTION: Mapping[str, Any] = {
    "model": "mocker",
    "messages": [{"role": "user", "content": "Why does the moon have phases?"}],
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "seed": 8,
    "return_token_ids": True,
    **STREAM,
}
CUTS = {
    "after some events": rb"(?:.*?\n\n){5}",
    "in the head": rb"HTTP/1\.1 200 ",
    "after an id": rb"\nid: [^\n]*\n",
    "in the data": rb"\ndata: \{\"id\"",
    "before the empty line": rb"\ndata: [^\n]*\n",
}


def test_answer_is_whole_wherever_its_connection_is_cut(cluster: Cluster) -> None:
    async def test() -> tuple[dict[str, Any], Proxy, ReturningClient]:
        frontend = await cluster.another_frontend(PAGES)
        proxy = Proxy(frontend.ready["http"], [*CUTS.values()])
        async with proxy.listening() as url:
            reported = await page("leave", url)
        return reported["read"], proxy, await undisturbed(frontend)

    read, proxy, expected = run(test)

    check_whole(read, expected)
    assert (read["sources"], read["lost"]) == (1, len(CUTS))
    first, *cursors = proxy.cursors
    assert first == ""
    assert len(cursors) == len(proxy.pauses_s) == len(CUTS)
    assert set(cursors) <= set(read["ids"])
    assert RETRY_S <= min(proxy.pauses_s) < DEFAULT_RETRY_S


def test_answer_is_whole_if_another_frontend_takes_the_place_of_its_own(cluster: Cluster) -> None:
    async def test() -> tuple[dict[str, Any], ReturningClient]:
        first, second = await cluster.another_frontend(PAGES), await cluster.another_frontend(PAGES)
        proxy = Proxy(first.ready["http"])

        async def kill() -> None:
            proxy.server = second.ready["http"]
            first.kill()

        async with proxy.listening() as url:
            reported = await page("leave", url, kill)
        return reported["read"], await undisturbed(second)

    read, expected = run(test)

    check_whole(read, expected)
    assert (read["sources"], read["opened"]) == (1, 2)


def test_answer_is_whole_if_another_frontend_takes_the_address_of_its_own(cluster: Cluster) -> None:
    async def test() -> tuple[dict[str, Any], ReturningClient]:
        first = await cluster.another_frontend(PAGES)
        frontends = [first]

        async def replace() -> None:
            first.kill()
            listen = f"--http-listen={first.ready['http']}"
            frontends.append(await cluster.another_frontend(PAGES, listen))

        reported = await page("leave", first.http, replace)
        return reported["read"], await undisturbed(frontends[-1])

    read, expected = run(test)

    check_whole(read, expected)
    assert (read["sources"], read["opened"]) == (1, 2)


def test_page_asks_anew_if_a_balancer_refuses_its_event_source(cluster: Cluster) -> None:
    async def test() -> tuple[dict[str, Any], ReturningClient]:
        frontend = await cluster.another_frontend(PAGES)
        proxy = Proxy(frontend.ready["http"])

        async def refuse() -> None:
            proxy.cut_and_refuse()

        async with proxy.listening() as url:
            reported = await page("leave", url, refuse)
        return reported["read"], await undisturbed(frontend)

    read, expected = run(test)

    check_whole(read, expected)
    assert (read["sources"], read["lost"]) == (2, 1)


def test_event_source_stops_at_the_end_although_its_page_does_not_close_it(cluster: Cluster) -> None:
    async def test() -> tuple[dict[str, Any], ReturningClient]:
        frontend = await cluster.another_frontend(PAGES)
        reported = await page("stay", frontend.http)
        return reported["read"], await undisturbed(frontend)

    read, expected = run(test)

    check_whole(read, expected)
    assert (read["sources"], read["opened"], read["lost"], read["done"]) == (1, 1, 1, 1)


def test_event_source_stops_when_another_one_reads_its_answer(cluster: Cluster) -> None:
    async def test() -> tuple[Reported, ReturningClient]:
        frontend = await cluster.another_frontend(PAGES)
        return await page("compete", frontend.http), await undisturbed(frontend)

    reported, expected = run(test)

    first = reported["first"]
    assert (first["error"], first["sources"], first["opened"]) == ("TAKEN_OVER", 1, 1)
    check_whole(reported["second"], expected)
    assert (reported["second"]["sources"], reported["second"]["opened"]) == (1, 1)


def test_event_source_stops_when_its_answer_is_cancelled(cluster: Cluster) -> None:
    async def test() -> dict[str, Any]:
        frontend = await cluster.another_frontend(PAGES)
        return (await page("cancel", frontend.http))["read"]

    read = run(test)

    assert (read["error"], read["done"], read["sources"], read["opened"]) == ("CANCELLED", 0, 1, 1)


def test_code_of_the_documentation_reads_an_answer(cluster: Cluster) -> None:
    [code] = [text for language, text in blocks() if language == "js" and "EventSource" in text]

    async def test() -> dict[str, Any]:
        frontend = await cluster.another_frontend(PAGES)
        return (await page("documented", frontend.http, question={"code": code.replace("smollm2", "mocker")}))["read"]

    read = run(test)

    assert read["finish"] == "length"
    assert read["text"]


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    """Run the test, if this machine has the browser."""
    need(BROWSER.missing)

    async def awaited() -> Any:
        return await test()

    return asyncio.run(awaited())


async def nothing() -> None:
    """Leave everything as it is."""


async def page(step: str, url: str, nemesis: Nemesis = nothing, question: Mapping[str, Any] = QUESTION) -> Reported:
    """Run a step of the page; return what it reports. `nemesis`: called once tokens have arrived."""
    return await steps([*BROWSER.command(), step, url, json.dumps(question)], nemesis)


async def undisturbed(frontend: Frontend) -> ReturningClient:
    """Read the same answer without a browser, and stop the frontend."""
    client = await ReturningClient({**QUESTION, "n": 1}).ask(frontend)
    frontend.kill()
    return client


def check_whole(read: dict[str, Any], expected: ReturningClient) -> None:
    choices, usage, cursor = expected.whole
    whole = choices[0]
    assert read["token_ids"] == whole.token_ids
    assert (read["text"], read["finish"], read["usage"]) == (whole.text, whole.finish, usage)
    assert len(set(read["ids"])) == len(read["ids"])
    assert read["ids"][-1] == cursor
