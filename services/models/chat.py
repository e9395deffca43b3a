"""A conversation as it is given to a model's chat template."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.models.chat_template import ChatTemplate, Turn


class _Part(dict[str, str]):
    """A part of a content. A template that writes it as it is, in Python's notation, does not walk over parts."""

    def __repr__(self) -> str:
        raise TypeError("it writes a list of parts as it is")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for a template.

    `texts`: the contents of all messages, then their names; "" for a message without a name. `parts`: the messages
    whose content is given as a list of parts.
    """

    template: ChatTemplate
    roles: tuple[str, ...]
    texts: tuple[str, ...]
    parts: frozenset[int] = frozenset()

    @property
    def contents(self) -> tuple[str, ...]:
        return self.texts[: len(self.roles)]

    @property
    def names(self) -> tuple[str, ...]:
        return self.texts[len(self.roles) :]

    @property
    def begins(self) -> list[int]:
        """`begin_of` each text."""
        return [self.begin_of(number) for number in range(len(self.texts))]

    def begin_of(self, number: int) -> int:
        """Where in a text that begins which the prompt must have: in an assistant's, after its last reasoning."""
        if number >= len(self.roles) or self.roles[number] != "assistant":
            return 0
        text = self.texts[number]
        ends = (text.rfind(end) + len(end) for end in self.template.reasoning.values() if end in text)
        return max(ends, default=0)

    def render(self, texts: Sequence[str] | None = None) -> str:
        """The prompt. `texts`: others in their place. Raises INVALID_ARGUMENT if the template refuses the messages."""
        given = self.texts if texts is None else texts
        return self.template.render([self._turn(index, given) for index in range(len(self.roles))])

    def _turn(self, index: int, texts: Sequence[str]) -> Turn:
        role, content, name = self.roles[index], texts[index], texts[len(self.roles) + index]
        if role == "developer" and not self.template.knows_developer:
            role = "system"
        turn: Turn = {"role": role, "content": content}
        if index in self.parts:
            turn["content"] = [_Part(type="text", text=content)]
        if name:
            turn["name"] = name
        return turn
