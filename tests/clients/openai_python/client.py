"""The `openai` package with nothing changed but its base URL: `client.py http://HOST:PORT/v1`.

It prints a line of JSON for each thing that it tries. failures.py has what can go wrong.
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, OpenAI

MODEL = "mocker"
ENOUGH = 5
QUESTION: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Why does the moon have phases?"}],
    "max_tokens": 120,
    "temperature": 0.8,
    "seed": 8,
}
PROMPT = {"model": MODEL, "prompt": "The moon", "max_tokens": 120, "temperature": 0.8, "seed": 8}
SHORT = {**QUESTION, "max_tokens": 20}
ENDLESS = {**QUESTION, "max_tokens": 100_000}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def main() -> None:
    """Try everything once."""
    with OpenAI(base_url=sys.argv[1], api_key="none") as client:
        models(client)
        tell("unary", **of_answer(client.chat.completions.create(**QUESTION)))
        tell("stream", **whole(client.chat.completions.create(**QUESTION, **STREAMED)))
        named(client)
        choices(client)
        logprobs(client)
        abort(client)
        lost_worker(client)
    asyncio.run(all_at_once(sys.argv[1]))


def models(client: OpenAI) -> None:
    """The models, and one of them."""
    tell("models", ids=[model.id for model in client.models.list()], id=client.models.retrieve(MODEL).id)


def named(client: OpenAI) -> None:
    """A request is called what the client calls it, and its name comes back beside the answer."""
    given = "openai_python-named"
    response = client.chat.completions.with_raw_response.create(**SHORT, extra_headers={"X-Request-Id": given})
    tell("named", given=given, request_id=response.headers["x-request-id"], id=response.parse().id)


def choices(client: OpenAI) -> None:
    """Two answers to one question, whole and as they come."""
    answer = client.chat.completions.create(**SHORT, n=2)
    unary = [choice.message.content for choice in answer.choices]
    stream = ["", ""]
    for chunk in client.chat.completions.create(**SHORT, n=2, stream=True):
        for choice in chunk.choices:
            stream[choice.index] += choice.delta.content or ""
    tell("choices", unary=unary, stream=stream, usage=answer.usage.to_dict())


def logprobs(client: OpenAI) -> None:
    """How likely each token was, and the two likeliest in its place, whole and as they come."""
    asked: dict[str, Any] = {**SHORT, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**asked).choices[0]
    stream = [
        token.to_dict()
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content
    ]
    unary = [token.to_dict() for token in answer.logprobs.content]
    tell("logprobs", text=answer.message.content, unary=unary, stream=stream)


def abort(client: OpenAI) -> None:
    """Leave a stream after its first piece; the worker stops within two steps."""
    with client.chat.completions.create(**ENDLESS, stream=True) as chunks:
        tell("abort", id=next(chunks).id)


def lost_worker(client: OpenAI) -> None:
    """Whoever starts this kills the worker once it reads `begun`. Nothing here knows of it."""
    tell("lost_worker", **whole(client.chat.completions.create(**QUESTION, **STREAMED), is_begun_told=True))


async def all_at_once(base_url: str) -> None:
    """The same without threads, and the older endpoint, which takes text instead of messages."""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client, asyncio.TaskGroup() as group:
        for kind, create, asked in (
            ("async", client.chat.completions.create, QUESTION),
            ("completion", client.completions.create, PROMPT),
        ):
            group.create_task(async_unary(kind, create, asked))
            group.create_task(async_stream(f"{kind}_stream", create, asked))


async def async_unary(step: str, create: Any, asked: dict[str, Any]) -> None:
    """An answer that comes as a whole."""
    tell(step, **of_answer(await create(**asked)))


async def async_stream(step: str, create: Any, asked: dict[str, Any]) -> None:
    """An answer as it comes."""
    tell(step, **joined([chunk async for chunk in await create(**asked, **STREAMED)]))


def of_answer(answer: Any) -> dict[str, Any]:
    """What is told of an answer, from either endpoint."""
    choice = answer.choices[0]
    text = choice.text if answer.object == "text_completion" else choice.message.content
    return {"id": answer.id, "text": text, "finish_reason": choice.finish_reason, "usage": answer.usage.to_dict()}


def whole(chunks: Any, is_begun_told: bool = False) -> dict[str, Any]:
    """What is told of a stream. With `is_begun_told` a line is printed when ENOUGH pieces of it are there."""
    read: list[Any] = []
    for chunk in chunks:
        read.append(chunk)
        if is_begun_told and len(read) == ENOUGH:
            tell("begun")
    return joined(read)


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The pieces of a stream put together. The last of them has the usage, and no choices."""
    *pieces, last = chunks
    chosen = [chunk.choices[0] for chunk in pieces]
    texts = [one.text if last.object == "text_completion" else one.delta.content for one in chosen]
    return {
        "id": last.id,
        "text": "".join(text or "" for text in texts),
        "finish_reason": chosen[-1].finish_reason,
        "usage": last.usage.to_dict(),
    }


def tell(step: str, **fields: Any) -> None:
    """Print what came of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
