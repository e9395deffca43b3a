"""Reads the new tokens from the engine's results of one request, with its own cursor.

The engine yields the same object for every result. Its lists are cumulative, and they shrink when the engine removes a
stop token that they contained before; its own field for the latest tokens refers to the last time this sequence had
any. The cursor therefore reads only `token_ids` and `logprobs`, from its own position on. It also looks for end tokens
itself, whatever the engine does about them, so that no end token reaches a client and none is missed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.core.errors import Failure, Reason
from services.core.interface import TokenLogprobs
from services.core.request import FinishReason, Request
from services.worker.engine import Output
from services.worker.engines.trtllm.sampling_params import ModelFacts, answer_end_ids, tokens_left


class ResultCursor:
    """The position in the answer of one request. The answer is over once `read` returns a finish or a failure.

    `drawn`: tokens received from the engine, including those of a cancelled request, without end tokens.
    """

    __slots__ = ("_enders", "_left", "_logprobs", "_min_left", "drawn", "key")

    def __init__(self, key: int, request: Request, facts: ModelFacts) -> None:
        self.key = key
        self.drawn = 0
        self._left = tokens_left(request, facts.context_length)
        self._min_left = request.stop.min_tokens - len(request.generated_token_ids)
        self._enders = answer_end_ids(request, facts.end_ids)
        self._logprobs = request.logprobs

    def read(self, completion: Any, *, is_finished: bool) -> Output | None:
        """Return what is new in the engine's completion; None: nothing. An unreadable result is a failure."""
        try:
            return self._read(completion, is_finished=is_finished)
        except Failure as failure:
            return Output(self.key, failure=failure)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            return Output(self.key, failure=_failed(f"its result cannot be read: {error!r}"))

    def skip(self, completion: Any) -> None:
        """Count the new tokens of a request that is no longer wanted, without reading them."""
        self.drawn = max(self.drawn, len(completion.token_ids))

    def _read(self, completion: Any, *, is_finished: bool) -> Output | None:
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
            raise _failed(f"it ended after {self.drawn} tokens, and min_tokens requires {self._min_left}")
        if not count and finish is None:
            return None
        return Output(self.key, given[:count], finish, logprobs=logprobs)

    def _read_logprobs(self, given: Sequence[Any] | None, token_ids: Sequence[int]) -> Sequence[TokenLogprobs] | None:
        if self._logprobs is None:
            return None
        entries = (given or ())[self.drawn : self.drawn + len(token_ids)]
        if len(entries) < len(token_ids):
            raise _failed("it returned tokens without their log probabilities")
        return [_logprobs_of(entry, token, self._logprobs) for entry, token in zip(entries, token_ids, strict=True)]


def _logprobs_of(entry: Mapping[int, Any] | float, token: int, rival_count: int) -> TokenLogprobs:
    """The log probabilities of `token` and of the `rival_count` likeliest tokens.

    The engine's entry has one more if the token drawn is not among the likeliest.
    """
    if not isinstance(entry, Mapping):
        if rival_count:
            raise _failed("it returned no log probabilities of other tokens")
        return TokenLogprobs(float(entry))
    if token not in entry:
        raise _failed("it returned no log probability of the token that it drew")
    ranked = sorted(((one, float(rival.logprob)) for one, rival in entry.items()), key=lambda one: (-one[1], one[0]))
    return TokenLogprobs(float(entry[token].logprob), tuple(ranked[:rival_count]))


def _finish_of(reason: str | None) -> FinishReason:
    """Translate the engine's finish reason. Raises Failure for one that is not an ordinary end, such as a timeout."""
    match reason:
        case "stop":
            return FinishReason.STOP
        case "length":
            return FinishReason.LENGTH
    raise _failed(f"it ended the answer early: {reason or 'without a reason'}")


def _failed(why: str) -> Failure:
    return Failure(Reason.ENGINE_ERROR, f"TensorRT-LLM failed on this request: {why}")
