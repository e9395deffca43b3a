"""Each of several prompts in one request is answered as if it were alone, even if the worker is killed.

| workload | nemesis | checker |
| --- | --- | --- |
| 6 prompts with 2 answers each, in one stream | SIGKILL of their worker | texts and usage equal those of 6 requests |
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from tests.integration.conftest import Start
from tests.integration.harness.clients.requests import REQUEST_S_MAX
from tests.integration.harness.plane.processes import Frontend

PROMPTS = [f"Prompt {number}" for number in range(6)]
FIELDS = {"model": "mocker", "n": 2, "max_tokens": 40, "temperature": 0.8, "seed": 7, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
EVENTS_BEFORE_KILL = 30
Answers = tuple[list[str], Counter[str]]
"""The text of each choice, and the usage of all."""


async def answers_one_by_one(session: aiohttp.ClientSession, frontend: Frontend) -> Answers:
    """Return the answers to each prompt in a request of its own."""
    texts, usage = [], Counter[str]()
    for prompt in PROMPTS:
        async with session.post(f"{frontend.http}/v1/completions", json=FIELDS | {"prompt": prompt}) as response:
            answer = await response.json()
        texts += [choice["text"] for choice in answer["choices"]]
        usage.update(answer["usage"])
    return texts, usage


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yield the events of a stream, which must end with [DONE]."""
    async for line in response.content:
        if line == b"data: [DONE]\n":
            return
        if line.strip():
            yield json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended without [DONE]")


def test_killed_worker_changes_no_answer_to_several_prompts(start_plane: Start) -> None:
    plane = start_plane()
    texts, usage = [""] * (2 * len(PROMPTS)), Counter[str]()

    async def scenario(session: aiohttp.ClientSession) -> Answers:
        undisturbed = await plane.worker("--mocker-itl-ms=1")
        expected = await answers_one_by_one(session, plane.frontend)
        undisturbed.kill()
        victim = await plane.worker("--mocker-itl-ms=20")
        count = 0
        body = FIELDS | STREAM | {"prompt": PROMPTS}
        async with session.post(f"{plane.frontend.http}/v1/completions", json=body) as response:
            async for event in events_of(response):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                usage.update(event["usage"] or {})
                if (count := count + 1) == EVENTS_BEFORE_KILL:
                    victim.kill()
                    await plane.worker("--mocker-itl-ms=1")
        return expected

    async def with_session() -> Answers:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S_MAX)) as session:
            return await scenario(session)

    assert asyncio.run(with_session()) == (texts, usage)
    assert plane.frontend.events_until_now("request moved")
