"""Finds the texts of a conversation in its prompt, by rendering it with letters in place of their characters.

This needs no knowledge of the template, and the letters survive what templates do with texts: trimming, joining, upper
case, JSON.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.core.errors import invalid
from services.models.chat import Chat
from services.models.chat_template import ChatTemplate

BASE = "z"
_DIGITS = "abcdefghijklmnop"
"""Letters that number the texts. They differ from BASE."""
_VISIBLE = re.compile(r"\S+")
_ALPHANUMERIC = re.compile(r"[A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class Disguise:
    """Replaces characters of a text, keeping its length and its blanks. `kept`: strings that are left as they are."""

    replaced: re.Pattern[str]
    kept: re.Pattern[str] | None = None

    def of(self, text: str, letter: str = BASE) -> str:
        """The text with `letter` in place of its characters."""
        pieces = [text] if self.kept is None else self.kept.split(text)
        pieces[::2] = [self.replaced.sub(lambda run: letter * len(run[0]), piece) for piece in pieces[::2]]
        return "".join(pieces)

    def count(self, text: str) -> int:
        """How many characters of the text it replaces."""
        pieces = [text] if self.kept is None else self.kept.split(text)
        return sum(len(run) for piece in pieces[::2] for run in self.replaced.findall(piece))


FULL = Disguise(_VISIBLE)


def keeping_literals(template: ChatTemplate) -> Disguise:
    """The disguise that keeps what the template looks for in contents, such as "</think>"."""
    return Disguise(_VISIBLE, _one_of(template.literals))


def keeping_signs(template: ChatTemplate) -> Disguise:
    """The disguise that also keeps all characters that JSON or HTML would escape."""
    return Disguise(_ALPHANUMERIC, _one_of(template.literals))


def shown(chat: Chat, disguise: Disguise, begins_at: Sequence[int] | None = None) -> dict[int, int]:
    """Text of the chat → how many of its replaced characters the prompt has, in the order of the prompt.

    Texts with none are left out. `begins_at`: where in each text to begin. Raises INVALID_ARGUMENT if the template
    refuses the disguised messages.
    """
    numbers = range(len(chat.texts))
    digits = range(max(1, -(-len(numbers).bit_length() // 4)))
    lines = ["".join([BASE, *(_DIGITS[number >> 4 * digit & 15] for digit in digits)]) for number in numbers]
    begins = begins_at or [0] * len(numbers)

    def disguised(number: int, letter: str) -> str:
        text, begin = chat.texts[number], begins[number]
        return text[:begin] + disguise.of(text[begin:], letter)

    prompts = [
        chat.render([disguised(number, line[place]) for number, line in enumerate(lines)]).lower()
        for place in range(len(digits) + 1)
    ]
    if len(set(map(len, prompts))) > 1:
        raise invalid("messages", "the model's chat template treats some letters differently from others")
    number_of = {line: number for number, line in enumerate(lines)}
    found = Counter(zip(*prompts, strict=True))
    return {number_of[line]: count for letters, count in found.items() if (line := "".join(letters)) in number_of}


def _one_of(words: frozenset[str]) -> re.Pattern[str] | None:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if words else None
