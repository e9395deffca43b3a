"""The `openai` package with nothing changed but its base URL: `client.py http://HOST:PORT/v1`.

It prints a line of JSON for each thing that it tries.
"""

import json
import sys
from typing import Any

from openai import OpenAI

MODEL = "mocker"
TOKENS = 120
ENOUGH = 5
QUESTION: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Why does the moon have phases?"}],
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "seed": 7,
}


def main() -> None:
    """Try everything once."""
    with OpenAI(base_url=sys.argv[1], api_key="none") as client:
        unary(client)
        stream(client)
        lost_worker(client)


def unary(client: OpenAI) -> None:
    """Ask, and wait for the whole answer."""
    answer = client.chat.completions.create(**QUESTION)
    choice = answer.choices[0]
    usage = answer.usage.model_dump(exclude_none=True)
    tell("unary", id=answer.id, text=choice.message.content, finish_reason=choice.finish_reason, usage=usage)


def stream(client: OpenAI) -> None:
    """Ask, and take the answer as it comes."""
    chunks = client.chat.completions.create(**QUESTION, stream=True, stream_options={"include_usage": True})
    tell("stream", **whole(chunks))


def lost_worker(client: OpenAI) -> None:
    """Whoever starts this kills the worker once it reads `begun`. Nothing here knows of it."""
    chunks = client.chat.completions.create(**QUESTION, stream=True, stream_options={"include_usage": True})
    tell("lost_worker", **whole(chunks, is_begun_told=True))


def whole(chunks: Any, is_begun_told: bool = False) -> dict[str, Any]:
    """The answer of a stream. With `is_begun_told` a line is printed when ENOUGH pieces of it are there."""
    answer: dict[str, Any] = {}
    pieces: list[str] = []
    for chunk in chunks:
        answer["id"] = chunk.id
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            answer["finish_reason"] = choice.finish_reason
        if chunk.usage is not None:
            answer["usage"] = chunk.usage.model_dump(exclude_none=True)
        if is_begun_told and len(pieces) >= ENOUGH:
            tell("begun")
            is_begun_told = False
    return {**answer, "text": "".join(pieces)}


def tell(step: str, **fields: Any) -> None:
    """Print what came of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
