"""The `openai` package with only its base URL changed: `client.py [--http2] http://HOST:PORT/v1`.

With --http2 it speaks HTTP/2, which httpx offers, by prior knowledge. It prints a line of JSON for each step. See
failures.py for errors.
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

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
    """Run each step once."""
    *options, base_url = sys.argv[1:]
    http2 = {"http1": False, "http2": True} if options == ["--http2"] else None
    http_client = None if http2 is None else DefaultHttpxClient(**http2)
    with OpenAI(base_url=base_url, api_key="none", http_client=http_client) as client:
        models(client)
        report("unary", **summarize(client.chat.completions.create(**QUESTION)))
        report("stream", **read_answer(client.chat.completions.create(**QUESTION, **STREAMED)))
        named(client)
        choices(client)
        logprobs(client)
        abort(client, is_told=http2 is None)
        lost_worker(client)
    asyncio.run(run_async(base_url, None if http2 is None else DefaultAsyncHttpxClient(**http2)))


def models(client: OpenAI) -> None:
    """List the models, and retrieve one of them."""
    report("models", ids=[model.id for model in client.models.list()], id=client.models.retrieve(MODEL).id)


def named(client: OpenAI) -> None:
    """Set the request id. The server returns it as a header and as a part of the answer's id."""
    given = "openai_python-named"
    response = client.chat.completions.with_raw_response.create(**SHORT, extra_headers={"X-Request-Id": given})
    request_id, version = response.headers["x-request-id"], response.http_response.http_version
    report("named", given=given, request_id=request_id, id=response.parse().id, http_version=version)


def choices(client: OpenAI) -> None:
    """Request two choices, unary and streamed."""
    answer = client.chat.completions.create(**SHORT, n=2)
    unary = [choice.message.content for choice in answer.choices]
    stream = ["", ""]
    for chunk in client.chat.completions.create(**SHORT, n=2, stream=True):
        for choice in chunk.choices:
            stream[choice.index] += choice.delta.content or ""
    report("choices", unary=unary, stream=stream, usage=answer.usage.to_dict())


def logprobs(client: OpenAI) -> None:
    """Request the log probability of each token and of the two most likely tokens, unary and streamed."""
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
    report("logprobs", text=answer.message.content, unary=unary, stream=stream)


def abort(client: OpenAI, *, is_told: bool) -> None:
    """Close a stream after its first chunk. The worker stops within two steps.

    `is_told`: the server hears of it. Over HTTP/2 httpx only forgets the stream, so the request is cancelled by its id.
    """
    with client.chat.completions.create(**ENDLESS, stream=True) as chunks:
        name = next(chunks).id
    if not is_told:
        client.post(f"/requests/{name.removeprefix('chatcmpl-')}/cancel", cast_to=object)
    report("abort", id=name)


def lost_worker(client: OpenAI) -> None:
    """The test that runs this program kills the worker when it reads `begun`. The client needs no code for that."""
    report("lost_worker", **read_answer(client.chat.completions.create(**QUESTION, **STREAMED), reports_begin=True))


async def run_async(base_url: str, http_client: DefaultAsyncHttpxClient | None) -> None:
    """Use the async client, and the older completions endpoint, which takes text instead of messages."""
    client = AsyncOpenAI(base_url=base_url, api_key="none", http_client=http_client)
    async with client, asyncio.TaskGroup() as group:
        for kind, create, asked in (
            ("async", client.chat.completions.create, QUESTION),
            ("completion", client.completions.create, PROMPT),
        ):
            group.create_task(async_unary(kind, create, asked))
            group.create_task(async_stream(f"{kind}_stream", create, asked))


async def async_unary(step: str, create: Any, asked: dict[str, Any]) -> None:
    """Request a unary answer."""
    report(step, **summarize(await create(**asked)))


async def async_stream(step: str, create: Any, asked: dict[str, Any]) -> None:
    """Request a streamed answer."""
    report(step, **merge_chunks([chunk async for chunk in await create(**asked, **STREAMED)]))


def summarize(answer: Any) -> dict[str, Any]:
    """Return the fields of an answer to report, from either endpoint."""
    choice = answer.choices[0]
    text = choice.text if answer.object == "text_completion" else choice.message.content
    return {"id": answer.id, "text": text, "finish_reason": choice.finish_reason, "usage": answer.usage.to_dict()}


def read_answer(chunks: Any, reports_begin: bool = False) -> dict[str, Any]:
    """Read a stream to its end. With `reports_begin`, report when ENOUGH chunks have arrived."""
    read: list[Any] = []
    for chunk in chunks:
        read.append(chunk)
        if reports_begin and len(read) == ENOUGH:
            report("begun")
    return merge_chunks(read)


def merge_chunks(chunks: list[Any]) -> dict[str, Any]:
    """Merge the chunks of a stream. The last chunk has the usage and no choices."""
    *pieces, last = chunks
    chosen = [chunk.choices[0] for chunk in pieces]
    texts = [one.text if last.object == "text_completion" else one.delta.content for one in chosen]
    return {
        "id": last.id,
        "text": "".join(text or "" for text in texts),
        "finish_reason": chosen[-1].finish_reason,
        "usage": last.usage.to_dict(),
    }


def report(step: str, **fields: Any) -> None:
    """Print the result of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
