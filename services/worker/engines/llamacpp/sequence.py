"""One request on the model: its tokens, how many of them are computed, and where its answer ends."""

from collections.abc import Sequence
from typing import Protocol

from services.core.errors import invalid
from services.core.interface import TokenLogprobs
from services.core.request import FinishReason, Request
from services.worker.engine import Output
from services.worker.engines.llamacpp.sampler import answer_end_ids, drawable

KV_BLOCK_TOKENS = 32


class Guide(Protocol):
    """The grammar of a guided answer: see `services/worker/guided/guide.py`."""

    @property
    def is_complete(self) -> bool: ...

    def wait_ready(self, timeout_s: float) -> bool: ...

    def token_mask(self) -> bytes: ...

    def accept_token(self, token: int) -> None: ...


class LlamaSequence:
    """One request on the model: its tokens, how many of them are in its cache, and its guide if it is guided.

    `seq_id`: the number of its cache, -1 before it has one.

    Only the engine's thread changes a sequence that is in a batch. Other threads may read `block_count` and
    `prefill_left`: each is derived from one number, so it is correct for the moment of the read.
    """

    def __init__(self, key: int, request: Request, end_ids: frozenset[int], guide: Guide | None = None) -> None:
        self.key = key
        self.request = request
        self.guide = guide
        self.seq_id = -1
        self.computed_count = 0
        self.tokens = [*request.prompt_token_ids, *request.generated_token_ids]
        self._prompt_count = len(request.prompt_token_ids)
        self._given_count = len(self.tokens)
        self._model_end_ids = end_ids
        self._answer_end_ids = answer_end_ids(request, end_ids)

    @property
    def generated(self) -> Sequence[int]:
        return self.tokens[self._prompt_count :]

    @property
    def pending_count(self) -> int:
        """Tokens that must be computed before the next one can be drawn."""
        return len(self.tokens) - self.computed_count

    @property
    def prefill_left(self) -> int:
        """Tokens of the request that are not computed yet."""
        return max(self._given_count - self.computed_count, 0)

    @property
    def block_count(self) -> int:
        """Cache blocks that its tokens take, including those that are not computed yet."""
        return blocks_of(len(self.tokens))

    def is_at_limit(self, context_length: int) -> bool:
        generated_count = len(self.tokens) - self._prompt_count
        return generated_count >= self.request.max_tokens or len(self.tokens) >= context_length

    def wait_guide(self, timeout_s: float) -> bool:
        """Wait until it is known which tokens may be drawn next. Returns False if that takes longer."""
        return self.guide is None or self.guide.wait_ready(timeout_s)

    def token_mask(self) -> bytes | None:
        """The tokens that may be drawn next, one bit for each token; None: any. Raises Failure."""
        if self.guide is None:
            return None
        return drawable(self.guide.token_mask(), self.request, len(self.generated), self._model_end_ids)

    def end_of_grammar(self) -> Output:
        """The last output of a guided answer that no token can continue."""
        assert self.guide is not None
        if self.guide.is_complete:
            return Output(self.key, finish=FinishReason.STOP)
        kind = None if self.request.guided is None else self.request.guided.kind
        detail = f"guided.{kind} cannot be followed: the model has no token that can continue the answer"
        return Output(self.key, failure=invalid("guided", detail))

    def append(self, token: int, context_length: int, logprobs: TokenLogprobs | None = None) -> Output:
        """Add the token that was drawn, or end the answer if it is an end token."""
        may_end = len(self.tokens) - self._prompt_count >= self.request.stop.min_tokens
        if may_end and token in self._answer_end_ids:
            return Output(self.key, finish=FinishReason.STOP)
        self.tokens.append(token)
        finish = FinishReason.LENGTH if self.is_at_limit(context_length) else None
        if self.guide is not None and finish is None:
            self.guide.accept_token(token)
        return Output(self.key, (token,), finish, logprobs=None if logprobs is None else (logprobs,))


def blocks_of(token_count: int) -> int:
    return -(-token_count // KV_BLOCK_TOKENS)
