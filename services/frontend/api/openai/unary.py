"""Gathers an answer that is sent whole: what each choice has so far."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason, Request


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


class Echo:
    """What each choice begins with."""

    def __init__(self, asked: Request, token_bytes: Callable[[], Sequence[bytes]]) -> None:
        """asked: as the client wrote it. token_bytes: of each token id; asked once there is an answer."""
        self._prompts = asked.parts or (asked,)
        self._n = asked.n
        self._token_bytes = token_bytes

    def text_of(self, index: int) -> str:
        """The prompt of a choice, by the choice's index. A token that is half a character alone shows as �."""
        prompt = self._prompts[index // self._n]
        if prompt.text is not None:
            return prompt.text
        token_bytes = self._token_bytes()
        return b"".join([token_bytes[token] for token in prompt.prompt_token_ids]).decode(errors="replace")
