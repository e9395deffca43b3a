"""A prompt that crashes the code which reads it costs itself only, over each protocol, with llama.cpp's own tokeniser.

The worker's model splits text as Mistral's do: by a regular expression that recurses once for each character.

| workload | nemesis | checker |
| --- | --- | --- |
| one stream; prompts of 24,062 times the same character | the tokeniser crashes | the stream is as it would be alone |
| | | each such prompt is refused with 400 |
| | | the frontend is the same process, and the next long prompt has the right number of tokens |
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer
from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.plane.plane import Plane

pytestmark = pytest.mark.model

UNITS = ("A", " ", "\n", "!", "漢")
LENGTH = 24_062
LONG = "It was the best of times, it was the worst of times. " * 25
"""Long enough for a helper process."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cached model with another name for its way to split a text; both names have the same length."""
    from services.models.download import resolve

    path = tmp_path_factory.mktemp("model") / "tekken.gguf"
    before, key, after = resolve("smollm2").read_bytes().partition(b"tokenizer.ggml.pre")
    path.write_bytes(before + key + after.replace(b"smollm", b"tekken", 1))
    yield path
    path.unlink()


async def refusal(plane: Plane, request: Request) -> Refused:
    with pytest.raises(Refused) as caught:
        await answer(plane.frontend, request)
    return caught.value


def test_prompt_that_crashes_the_tokeniser_is_refused_and_disturbs_no_stream(start_plane: Start, model: Path) -> None:
    plane = start_plane()
    watched = Request(model="tekken", prompt="Once upon a time", max_tokens=64)
    long = replace(watched, prompt=LONG, max_tokens=4)

    async def scenario() -> None:
        options = ("--engine=llamacpp", f"--model={model}", "--served-model-name=tekken", "--context-length=8192")
        await plane.worker(*options, "--threads=1", "--engine-request-limit=4")
        alone, expected = await answer(plane.frontend, watched), await answer(plane.frontend, long)
        pid = plane.frontend.pid
        has_begun = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            stream = group.create_task(answer(plane.frontend, watched, lambda _: has_begun.set()))
            await has_begun.wait()
            for unit in UNITS:
                for protocol in PROTOCOLS:
                    for is_chat in (False, True):
                        hostile = Request(protocol, is_chat, model="tekken", prompt=unit * LENGTH, max_tokens=4)
                        refused = await refusal(plane, hostile)
                        assert refused.code in (400, "INVALID_ARGUMENT"), (unit, protocol, is_chat)
                        assert refused.reason == "INVALID_ARGUMENT"
                        assert "SIGSEGV" in refused.error["message"]
                assert await answer(plane.frontend, long) == expected
        assert stream.result() == alone
        assert plane.frontend.pid == pid
        assert plane.frontend.status() is None
        counts = await read_metrics(plane.frontend)
        assert counts.sum("dynamo_frontend_helpers_lost_total") == len(UNITS) * len(PROTOCOLS) * 2
        assert counts.sum("dynamo_frontend_helpers_lost_total", cause="crash") == len(UNITS) * len(PROTOCOLS) * 2

    asyncio.run(scenario())
