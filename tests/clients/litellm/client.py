"""LiteLLM as a client, with only the base URL changed: `client.py http://HOST:PORT/v1`.

It prints a line of JSON for each step.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Otherwise the import downloads a list of prices from GitHub.

import litellm

litellm.suppress_debug_info = True  # Otherwise it prints advice among the answers.

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
    """Run each step once."""
    report("unary", summarize(litellm.completion(**QUESTION)))
    report("stream", summarize(merge_chunks(litellm.completion(**STREAMED))))
    asyncio.run(run_async())
    # The test that runs this program kills the worker when it reads `begun`. The client needs no code for that.
    report("lost_worker", summarize(merge_chunks(litellm.completion(**STREAMED), reports_begin=True)))


async def run_async() -> None:
    """Request a unary and a streamed answer at once, with asyncio."""
    async with asyncio.TaskGroup() as group:
        unary = group.create_task(litellm.acompletion(**QUESTION))
        chunks = [chunk async for chunk in await litellm.acompletion(**STREAMED)]
    report("async", summarize(unary.result()))
    report("async_stream", summarize(merge_chunks(chunks)))


def merge_chunks(chunks: Iterable[Any], reports_begin: bool = False) -> Any:
    """Merge the chunks of a stream. With `reports_begin`, report when ENOUGH of them have arrived."""
    read = []
    for chunk in chunks:
        read.append(chunk)
        if reports_begin and len(read) == ENOUGH:
            report("begun", {})
    return litellm.stream_chunk_builder(read)


def summarize(answer: Any) -> dict[str, Any]:
    """Return the fields of an answer to report."""
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


def report(step: str, fields: dict[str, Any]) -> None:
    """Print the result of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
