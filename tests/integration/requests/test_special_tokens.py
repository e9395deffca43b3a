"""Special tokens of a real model: they stop an answer that spells them, are named and billed, and are never shown.

| workload | nemesis | checker |
| --- | --- | --- |
| stop strings that spell special tokens, some with `min_tokens` | – | a search in the whole answer |
| the same with log probabilities, SSE and unary | – | equal, one for each token, no offset beyond the text |
| a stop string of several special tokens, gRPC | SIGKILL of the worker before and within it | `Answer`, one move |
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.models.download import resolve
from services.models.tokenizers.gguf import GgufTokenizer, tokenizer_content
from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, run_together
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

pytestmark = pytest.mark.model

OPTIONS = ("--engine=llamacpp", "--model=smollm2", "--served-model-name=tiny", "--threads=1")
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
"""The model ends its turn after a few tokens. With `ignore_eos` it then writes the special tokens of other turns."""
WHOLE = Request(model="tiny", prompt=PROMPT, max_tokens=24, protocol="grpc", logprobs=2)
END, START = "<|im_end|>", "<|im_start|>"
TRIES_MAX = 5
"""How often to strike at a position: an answer may be complete before its client has the token there."""


@dataclass(frozen=True)
class Spelled:
    """An answer without stop strings. `pieces`: what each token spells, and whether that is shown."""

    pieces: Sequence[tuple[str, bool]]

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    def stopped(self, stop: str, min_tokens: int = 0) -> tuple[str, int]:
        """The text shown and the number of tokens of an answer that this string stops."""
        for count in range(min_tokens + 1, len(self.pieces) + 1):
            before = sum(len(piece) for piece, _ in self.pieces[: count - 1])
            so_far = "".join(piece for piece, _ in self.pieces[:count])
            if (found := so_far.find(stop, max(0, before - len(stop) + 1))) >= 0:
                return self._shown(found), count
        raise AssertionError(f"{stop!r} is not in {self.text!r}")

    def _shown(self, size: int) -> str:
        shown = ""
        for piece, is_shown in self.pieces:
            shown += piece[:size] if is_shown else ""
            size -= min(size, len(piece))
        return shown


async def spelled_answer(plane: Plane) -> Spelled:
    tokenizer = GgufTokenizer(tokenizer_content(resolve("smollm2")))
    token_ids = (await answer(plane.frontend, WHOLE)).token_ids or ()
    return Spelled(
        [
            (
                tokenizer.special_tokens.get(token) or tokenizer.token_bytes[token].decode(),
                token not in tokenizer.special_tokens,
            )
            for token in token_ids
        ]
    )


def test_stop_strings_find_special_tokens_and_log_probabilities_name_them(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        await plane.worker(*OPTIONS)
        spelled = await spelled_answer(plane)
        first = spelled.text.index(END)
        cases = {
            "token": replace(WHOLE, stop=END),
            "part of a token": replace(WHOLE, stop="<|im_s"),
            "with text before": replace(WHOLE, stop=spelled.text[first - 1 : first] + END),
            "with text after": replace(WHOLE, stop=spelled.text[first : first + len(END) + 1]),
            "after min_tokens": replace(WHOLE, stop=END, min_tokens=spelled.stopped(END)[1]),
            "several tokens": replace(WHOLE, stop=several(spelled)),
        }
        for name, case in cases.items():
            answers = await run_together(
                answer(plane.frontend, replace(case, protocol=protocol)) for protocol in PROTOCOLS
            )
            assert case.stop is not None
            text, count = spelled.stopped(case.stop, case.min_tokens)
            for got in answers:
                assert (got.text, got.completion_tokens, got.finish) == (text, count, "stop"), name
                check_logprobs(got, spelled, count)
            assert answers[1].only.logprobs == answers[2].only.logprobs, name

    asyncio.run(scenario())


def several(spelled: Spelled) -> str:
    """A stop string from one special token to the next but one, and a character more."""
    first = spelled.text.index(START)
    return spelled.text[first : spelled.text.index(START, first + 1) + len(START) + 1]


def check_logprobs(got: Answer, spelled: Spelled, count: int) -> None:
    assert len(got.only.logprobs) == count
    if got.token_ids is None:
        assert [name for name, *_ in got.only.logprobs] == [piece for piece, _ in spelled.pieces[:count]]
        assert all(name in top for name, _, top, _ in got.only.logprobs)
        offsets = [offset for *_, offset in got.only.logprobs]
        assert offsets == sorted(offsets)
        assert max(offsets) <= len(got.text)


def test_killed_worker_changes_no_answer_that_a_special_token_stops(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        worker = await plane.worker(*OPTIONS)
        spelled = await spelled_answer(plane)
        stop = several(spelled)
        text, count = spelled.stopped(stop)
        expected = await answer(plane.frontend, replace(WHOLE, stop=stop))
        assert (expected.text, expected.completion_tokens) == (text, count)
        begun = next(number for number, (piece, _) in enumerate(spelled.pieces, start=1) if piece == START)
        for target in (1, begun, count - 1):
            moves: list[Any] = []
            for number in range(TRIES_MAX):
                request = WHOLE.named(f"cut-at-{target}-{number}", stop=stop)
                got, worker = await cut(plane, worker, request, target)
                assert got == expected
                if moves := plane.frontend.moves(request.request_id):
                    break
            assert len(moves) == 1, target

    asyncio.run(scenario())


async def cut(plane: Plane, worker: Process, request: Request, target: int) -> tuple[Answer, Process]:
    """The answer to a request whose worker is killed when the client has `target` tokens, and the next worker."""
    reached = asyncio.Event()

    def on_tokens(count: int) -> None:
        if count >= target and not reached.is_set():
            worker.kill()
            reached.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(answer(plane.frontend, request, on_tokens))
        await until(reached.is_set)
        successor = await plane.worker(*OPTIONS)
    return task.result(), successor
