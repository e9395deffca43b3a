"""What a client has got of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Choice:
    """One choice, as far as it has come. `logprob_count`: log probabilities that have come."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    logprob_count: int = 0


@dataclass
class Visit:
    """One request to one frontend. `ending`: "complete", the reason of a failure, or empty if it has neither."""

    frontend: str
    is_resume: bool
    began_s: float
    ended_s: float = 0.0
    ending: str = ""
    loss: str = ""


@dataclass
class Answer:
    """One answer over all its connections.

    `is_complete`: the end has come: `[DONE]`, `complete_final`, or a whole body. `failure`: the reason of an error.
    `losses`: why connections ended without either. `faults`: what no answer may have. `visits`: each time that the
    client sent a request for it. `has_left`: the client has given it up. `cursor`: how far it has come. `usage`: tokens
    of the prompt and of the answer.
    """

    choices: list[Choice]
    is_complete: bool = False
    failure: str | None = None
    detail: str = ""
    usage: tuple[int, int] | None = None
    losses: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    has_left: bool = False
    cursor: str = ""

    @property
    def token_count(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def has_finished(self) -> bool:
        """Whether each choice has its finish reason."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.failure is not None or self.has_left

    def add(
        self,
        index: int,
        position: int | None,
        token_ids: Sequence[int],
        text: str,
        finish: str | None,
        logprob_count: int | None,
    ) -> None:
        """Add a piece of a choice. `position`: of its first token, where the protocol says it."""
        choice = self.choices[index]
        if choice.finish is not None and (token_ids or text):
            self.faults.append(f"choice {index}: {token_ids} {text!r} follow the finish")
        if position is not None and position != len(choice.token_ids):
            self.faults.append(f"choice {index}: position {position} instead of {len(choice.token_ids)}")
        choice.token_ids += token_ids
        choice.text += text
        choice.finish = finish or choice.finish
        choice.logprob_count += logprob_count or 0
