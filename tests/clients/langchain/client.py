"""LangChain's `ChatOpenAI` with nothing changed but its base URL: `client.py http://HOST:PORT/v1`.

It prints a line of JSON for each thing that it tries.
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
    """Try everything once."""
    # Usage of streams: LangChain asks other servers than OpenAI's for it only if told to.
    model = ChatOpenAI(
        model="mocker",
        base_url=sys.argv[1],
        api_key="none",
        max_tokens=120,
        temperature=0.8,
        seed=7,
        stream_usage=True,
    )
    tell("unary", of_answer(model.invoke(QUESTION)))
    tell("stream", of_answer(joined(model.stream(QUESTION))))
    asyncio.run(without_threads(model))
    lost_worker(model)


async def without_threads(model: ChatOpenAI) -> None:
    """The same in asyncio, both at once."""
    async with asyncio.TaskGroup() as group:
        unary = group.create_task(model.ainvoke(QUESTION))
        chunks = [chunk async for chunk in model.astream(QUESTION)]
    tell("async", of_answer(unary.result()))
    tell("async_stream", of_answer(joined(chunks)))


def lost_worker(model: ChatOpenAI) -> None:
    """Whoever starts this kills the worker once it reads `begun`. Nothing here knows of it."""
    request_id = "langchain-lost_worker"  # LangChain's streams do not tell what the server called them.
    chunks = model.stream(QUESTION, extra_headers={"X-Request-Id": request_id})
    tell("lost_worker", {**of_answer(joined(chunks, is_begun_told=True)), "id": request_id})


def joined(chunks: Iterable[AIMessageChunk], is_begun_told: bool = False) -> AIMessageChunk:
    """A stream's chunks as one message. With `is_begun_told` a line is printed when ENOUGH of them are there."""
    answer = AIMessageChunk(content="")
    for count, chunk in enumerate(chunks, start=1):
        answer += chunk
        if is_begun_told and count == ENOUGH:
            tell("begun", {})
    return answer


def of_answer(message: AIMessage) -> dict[str, Any]:
    """What is told of an answer."""
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


def tell(step: str, fields: dict[str, Any]) -> None:
    """Print what came of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
