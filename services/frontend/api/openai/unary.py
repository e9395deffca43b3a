"""Collects the answer of a request without `stream`, choice by choice."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.interface import Delta, TokenLogprobs
from services.core.request import Continuation, FinishReason


@dataclass(slots=True)
class Collected:
    """One choice. `token_ids`: only if they are kept, or came with log probabilities."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    continuation: Continuation | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Collector:
    """The sink of a unary answer. `keeps_token_ids`: of all tokens, not only of those with log probabilities."""

    def __init__(self, *, keeps_token_ids: bool = False) -> None:
        self._keeps_token_ids = keeps_token_ids
        self._choices: dict[int, Collected] = {}

    def deliver(self, delta: Delta) -> None:
        choice = self._choices.get(delta.choice)
        if choice is None:
            choice = self._choices[delta.choice] = Collected()
        choice.texts.append(delta.text)
        if delta.logprobs or self._keeps_token_ids:
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            choice.finish_reason, choice.continuation = delta.finish_reason, delta.continuation

    @property
    def choices(self) -> Mapping[int, Collected]:
        """The choices in order of their index, without those that have produced nothing."""
        return dict(sorted(self._choices.items()))
