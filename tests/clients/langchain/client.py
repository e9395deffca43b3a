"""LangChain's `ChatOpenAI` with only its base URL changed: `client.py http://HOST:PORT/v1`.

It prints a line of JSON for each step.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI

ENOUGH = 5
QUESTION = "Why does the moon have phases?"


def main() -> None:
    """Run each step once."""
    # stream_usage: LangChain requests the usage of streams from OpenAI only, unless this is set.
    model = ChatOpenAI(
        model="mocker",
        base_url=sys.argv[1],
        api_key="none",
        max_tokens=120,
        temperature=0.8,
        seed=7,
        stream_usage=True,
    )
    report("unary", summarize(model.invoke(QUESTION)))
    report("stream", summarize(merge_chunks(model.stream(QUESTION))))
    asyncio.run(run_async(model))
    lost_worker(model)


async def run_async(model: ChatOpenAI) -> None:
    """Request a unary and a streamed answer at once, with asyncio."""
    async with asyncio.TaskGroup() as group:
        unary = group.create_task(model.ainvoke(QUESTION))
        chunks = [chunk async for chunk in model.astream(QUESTION)]
    report("async", summarize(unary.result()))
    report("async_stream", summarize(merge_chunks(chunks)))


def lost_worker(model: ChatOpenAI) -> None:
    """The test that runs this program kills the worker when it reads `begun`. The client needs no code for that."""
    request_id = "langchain-lost_worker"  # LangChain's streams do not report the server's id.
    chunks = model.stream(QUESTION, extra_headers={"X-Request-Id": request_id})
    report("lost_worker", {**summarize(merge_chunks(chunks, reports_begin=True)), "id": request_id})


def merge_chunks(chunks: Iterable[AIMessageChunk], reports_begin: bool = False) -> AIMessageChunk:
    """Merge the chunks of a stream. With `reports_begin`, report when ENOUGH of them have arrived."""
    answer = AIMessageChunk(content="")
    for count, chunk in enumerate(chunks, start=1):
        answer += chunk
        if reports_begin and count == ENOUGH:
            report("begun", {})
    return answer


def summarize(message: AIMessage) -> dict[str, Any]:
    """Return the fields of an answer to report."""
    usage = message.usage_metadata
    assert usage is not None
    return {
        "text": message.content,
        "finish_reason": message.response_metadata["finish_reason"],
        "usage": {
            "prompt_tokens": usage["input_tokens"],
            "completion_tokens": usage["output_tokens"],
            "total_tokens": usage["total_tokens"],
        },
    }


def report(step: str, fields: dict[str, Any]) -> None:
    """Print the result of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
