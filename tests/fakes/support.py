"""Shared by the tests of the fake: an engine that is shut down at the end, and requests to it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fakes.tensorrt_llm import LLM, SamplingParams
from tests.fakes.tensorrt_llm.llmapi import RequestOutput

END_ID = 256
PROMPT = [*b"Tell me of the sea."]
SILENCE_S = 0.05
"""How long a test waits to see that no response arrives."""


@contextmanager
def engine(**kwargs: Any) -> Iterator[LLM]:
    llm = LLM("bytes", **kwargs)
    try:
        yield llm
    finally:
        llm.shutdown()


def greedy(**fields: Any) -> SamplingParams:
    """Greedy parameters; the answer ends only at its limit, unless `fields` change that."""
    return SamplingParams(**({"top_k": 1, "end_id": END_ID, "ignore_eos": True, "detokenize": False} | fields))


def start(
    llm: LLM, prompt: list[int] = PROMPT, *, params: SamplingParams | None = None, **fields: Any
) -> RequestOutput:
    """Start a streaming request with `fields` in its SamplingParams."""
    return llm.generate_async(inputs=prompt, sampling_params=params or greedy(**fields), streaming=True)


async def answer(llm: LLM, prompt: list[int] = PROMPT, **fields: Any) -> list[int]:
    """Run a request to its end. Returns its token ids."""
    return list((await start(llm, prompt, **fields)).outputs[0].token_ids)


async def is_silent(result: RequestOutput) -> bool:
    """Whether no response arrives within SILENCE_S."""
    try:
        await asyncio.wait_for(anext(result), SILENCE_S)
    except TimeoutError:
        return True
    return False
