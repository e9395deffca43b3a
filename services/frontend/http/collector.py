"""Gathers an answer that is sent whole: what each choice has so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.request import Delta, FinishReason, TokenLogprobs


@dataclass(slots=True)
class Collected:
    """One choice. token_ids and logprobs: of the tokens that came with log probabilities."""

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
        """By index, in order; those of which nothing has come are missing."""
        return dict(sorted(self._choices.items()))
