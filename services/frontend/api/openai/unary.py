"""Collects the answer of a request without `stream`, choice by choice."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason


@dataclass(slots=True)
class Collected:
    """One choice. `token_ids`, `logprobs`: only of tokens that came with log probabilities."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Collector:
    """The sink of a unary answer."""

    def __init__(self) -> None:
        self._choices: dict[int, Collected] = {}

    def deliver(self, delta: Delta) -> None:
        choice = self._choices.get(delta.choice)
        if choice is None:
            choice = self._choices[delta.choice] = Collected()
        choice.texts.append(delta.text)
        if delta.logprobs:
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason

    @property
    def choices(self) -> Mapping[int, Collected]:
        """The choices in order of their index, without those that have produced nothing."""
        return dict(sorted(self._choices.items()))
