"""The `openai` package with the HTTP client of `unbroken-client`: `client.py STEP URL URL`.

It prints a line of JSON for each of two answers: `undisturbed`, from the second server, and `healed`. The test that
runs this program kills the first server when it reads `begun`. The steps have no code for that.
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, OpenAI

from unbroken_client import RetryPolicy, async_httpx_client, httpx_client

ENOUGH = 5
SILENCE_S_MAX = 5.0
QUESTION: dict[str, Any] = {
    "model": "mocker",
    "messages": [{"role": "user", "content": "Why does the moon have phases?"}],
    "max_tokens": 120,
    "temperature": 0.8,
    "seed": 8,
    "n": 2,
}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def main() -> None:
    """Run one step, undisturbed and then with the loss of a server."""
    step, first, second = sys.argv[1:]
    if step == "left":
        leave([second])
        return
    run = {
        "stream": stream,
        "whole": whole,
        "async_stream": async_stream,
        "async_whole": async_whole,
        "lost_plane": with_tokens,
        "frozen": watched,
    }[step]
    report("undisturbed", **run([second], lambda: None))
    report("healed", **run([first, second], lambda: report("begun")))


def stream(urls: list[str], begun: Any, policy: RetryPolicy | None = None, **more: Any) -> dict[str, Any]:
    """Read a stream."""
    http = httpx_client(urls, policy=policy)
    with OpenAI(base_url=f"{urls[0]}/v1", api_key="none", max_retries=0, http_client=http) as client:
        answer = Answer(begun)
        for chunk in client.chat.completions.create(**QUESTION, **STREAMED, **more):
            answer.add(chunk)
    return answer.fields


def with_tokens(urls: list[str], begun: Any) -> dict[str, Any]:
    """Read a stream with its token ids, so that it goes on although all workers are lost."""
    return stream(urls, begun, extra_body={"return_token_ids": True})


def watched(urls: list[str], begun: Any) -> dict[str, Any]:
    """Read a stream, and leave a server that is silent for too long."""
    return stream(urls, begun, RetryPolicy(silence_s_max=SILENCE_S_MAX))


def leave(urls: list[str]) -> None:
    """Close a stream after its first chunk."""
    with OpenAI(base_url=f"{urls[0]}/v1", api_key="none", max_retries=0, http_client=httpx_client(urls)) as client:
        endless = {**QUESTION, "max_tokens": 100_000}
        with client.chat.completions.create(**endless, stream=True) as chunks:
            report("left", id=next(chunks).id)


def whole(urls: list[str], begun: Any) -> dict[str, Any]:
    """Wait for a whole answer."""
    with OpenAI(base_url=f"{urls[0]}/v1", api_key="none", max_retries=0, http_client=httpx_client(urls)) as client:
        begun()
        return summarize(client.chat.completions.create(**QUESTION))


def async_stream(urls: list[str], begun: Any) -> dict[str, Any]:
    """Read a stream with the async client."""

    async def read() -> dict[str, Any]:
        http = async_httpx_client(urls)
        async with AsyncOpenAI(base_url=f"{urls[0]}/v1", api_key="none", max_retries=0, http_client=http) as client:
            answer = Answer(begun)
            async for chunk in await client.chat.completions.create(**QUESTION, **STREAMED):
                answer.add(chunk)
        return answer.fields

    return asyncio.run(read())


def async_whole(urls: list[str], begun: Any) -> dict[str, Any]:
    """Wait for a whole answer with the async client."""

    async def wait() -> dict[str, Any]:
        http = async_httpx_client(urls)
        async with AsyncOpenAI(base_url=f"{urls[0]}/v1", api_key="none", max_retries=0, http_client=http) as client:
            begun()
            return summarize(await client.chat.completions.create(**QUESTION))

    return asyncio.run(wait())


class Answer:
    """Collects the chunks of a stream, and calls `begun` once ENOUGH have arrived."""

    def __init__(self, begun: Any) -> None:
        self._begun = begun
        self._count = 0
        self.fields: dict[str, Any] = {"texts": ["", ""], "finish_reasons": [None, None], "usage": None}

    def add(self, chunk: Any) -> None:
        """Add a chunk."""
        self._count += 1
        for choice in chunk.choices:
            self.fields["texts"][choice.index] += choice.delta.content or ""
            self.fields["finish_reasons"][choice.index] = choice.finish_reason
        if chunk.usage is not None:
            self.fields["usage"] = chunk.usage.to_dict()
        if self._count == ENOUGH:
            self._begun()


def summarize(answer: Any) -> dict[str, Any]:
    """Return the same fields of a whole answer."""
    return {
        "texts": [choice.message.content for choice in answer.choices],
        "finish_reasons": [choice.finish_reason for choice in answer.choices],
        "usage": answer.usage.to_dict(),
    }


def report(step: str, **fields: Any) -> None:
    """Print the result of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
