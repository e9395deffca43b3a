"""Reads one answer off the engine's results: what is new in each, by a cursor of our own.

The engine yields the same object again and again. Its lists are cumulative, and they shrink when it cuts a stop token
off that was in them before; what it calls new is what was new to this sequence when it last had something. So only
`token_ids` and `logprobs` are read, and only from the cursor on. The ends are looked for here as well, whatever the
engine does about them: no end token reaches a client, and none is missed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.core.errors import Failure, Reason
from services.core.interface import TokenLogprobs
from services.core.request import FinishReason, Request
from services.worker.engine import Output
from services.worker.engines.trtllm.sampling_params import ModelFacts, answer_end_ids, tokens_left


class ResultCursor:
    """Where one request's answer stands. It is over once `take` has returned an output with a finish or a failure.

    drawn: tokens that have come of the engine, wanted or not, end tokens not counted.
    """

    __slots__ = ("_enders", "_left", "_logprobs", "_min_left", "drawn", "key")

    def __init__(self, key: int, request: Request, facts: ModelFacts) -> None:
        self.key = key
        self.drawn = 0
        self._left = tokens_left(request, facts.context_length)
        self._min_left = request.stop.min_tokens - len(request.generated_token_ids)
        self._enders = answer_end_ids(request, facts.end_ids)
        self._logprobs = request.logprobs

    def take(self, completion: Any, *, is_finished: bool) -> Output | None:
        """What is new of the engine's only completion of this request; None: nothing. What can't be read fails it."""
        try:
            return self._take(completion, is_finished=is_finished)
        except Failure as failure:
            return Output(self.key, failure=failure)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            return Output(self.key, failure=_failed(f"its result cannot be read: {error!r}"))

    def skip(self, completion: Any) -> None:
        """Nobody wants it any more: what is new is only counted."""
        self.drawn = max(self.drawn, len(completion.token_ids))

    def _take(self, completion: Any, *, is_finished: bool) -> Output | None:
        start = self.drawn
        given = completion.token_ids[start : start + self._left]
        count = next((index for index, token in enumerate(given) if token in self._enders), len(given))
        finish = FinishReason.STOP if count < len(given) else None
        logprobs = self._read_logprobs(completion.logprobs, given[:count])
        self.drawn += count
        self._left -= count
        if finish is None and self._left == 0:
            finish = FinishReason.LENGTH
        elif finish is None and is_finished:
            finish = _finish_of(completion.finish_reason)
        if finish is FinishReason.STOP and self.drawn < self._min_left:
            raise _failed(f"it ended after {self.drawn} tokens of at least {self._min_left} that were asked for")
        if not count and finish is None:
            return None
        return Output(self.key, given[:count], finish, logprobs=logprobs)

    def _read_logprobs(self, given: Sequence[Any] | None, token_ids: Sequence[int]) -> Sequence[TokenLogprobs] | None:
        if self._logprobs is None:
            return None
        entries = (given or ())[self.drawn : self.drawn + len(token_ids)]
        if len(entries) < len(token_ids):
            raise _failed("it gave tokens without their log probabilities")
        return [_logprobs_of(entry, token, self._logprobs) for entry, token in zip(entries, token_ids, strict=True)]


def _logprobs_of(entry: Mapping[int, Any] | float, token: int, rival_count: int) -> TokenLogprobs:
    """Of `token`, and of as many of the likeliest as were asked for. The engine gives one more if it drew another."""
    if not isinstance(entry, Mapping):
        if rival_count:
            raise _failed("it gave no log probabilities of other tokens")
        return TokenLogprobs(float(entry))
    if token not in entry:
        raise _failed("it gave no log probability of the token that it drew")
    ranked = sorted(((one, float(rival.logprob)) for one, rival in entry.items()), key=lambda one: (-one[1], one[0]))
    return TokenLogprobs(float(entry[token].logprob), tuple(ranked[:rival_count]))


def _finish_of(reason: str | None) -> FinishReason:
    """Raises Failure for an end that is none: cut off, out of time, or without a reason."""
    match reason:
        case "stop":
            return FinishReason.STOP
        case "length":
            return FinishReason.LENGTH
    raise _failed(f"it ended the answer by itself: {reason or 'without a reason'}")


def _failed(why: str) -> Failure:
    return Failure(Reason.ENGINE_ERROR, f"TensorRT-LLM failed on this request: {why}")
