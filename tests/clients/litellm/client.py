"""LiteLLM as a client, with nothing changed but the base URL: `client.py http://HOST:PORT/v1`.

It prints a line of JSON for each thing that it tries.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Else it asks GitHub for a list of prices when it is imported.

import litellm

litellm.suppress_debug_info = True  # It prints advice among the answers.

ENOUGH = 5
QUESTION: dict[str, Any] = {
    "model": "openai/mocker",
    "messages": [{"role": "user", "content": "Why does the moon have phases?"}],
    "api_base": sys.argv[1],
    "api_key": "none",
    "max_tokens": 120,
    "temperature": 0.8,
    "seed": 7,
}
STREAMED: dict[str, Any] = {**QUESTION, "stream": True, "stream_options": {"include_usage": True}}


def main() -> None:
    """Try everything once."""
    tell("unary", of_answer(litellm.completion(**QUESTION)))
    tell("stream", of_answer(joined(litellm.completion(**STREAMED))))
    asyncio.run(without_threads())
    # Whoever starts this kills the worker once it reads `begun`. Nothing here knows of it.
    tell("lost_worker", of_answer(joined(litellm.completion(**STREAMED), is_begun_told=True)))


async def without_threads() -> None:
    """The same in asyncio, both at once."""
    async with asyncio.TaskGroup() as group:
        unary = group.create_task(litellm.acompletion(**QUESTION))
        chunks = [chunk async for chunk in await litellm.acompletion(**STREAMED)]
    tell("async", of_answer(unary.result()))
    tell("async_stream", of_answer(joined(chunks)))


def joined(chunks: Iterable[Any], is_begun_told: bool = False) -> Any:
    """A stream's chunks as one answer. With `is_begun_told` a line is printed when ENOUGH of them are there."""
    read = []
    for chunk in chunks:
        read.append(chunk)
        if is_begun_told and len(read) == ENOUGH:
            tell("begun", {})
    return litellm.stream_chunk_builder(read)


def of_answer(answer: Any) -> dict[str, Any]:
    """What is told of an answer."""
    choice, usage = answer.choices[0], answer.usage
    return {
        "id": answer.id,
        "text": choice.message.content,
        "finish_reason": choice.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
    }


def tell(step: str, fields: dict[str, Any]) -> None:
    """Print what came of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
