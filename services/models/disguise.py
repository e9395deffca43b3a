"""Finds the texts of a conversation in its prompt, by rendering it with letters in place of their characters.

This needs no knowledge of the template, and the letters survive what templates do with texts: trimming, joining, upper
case, JSON.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from services.core.errors import invalid
from services.models.chat import Chat
from services.models.chat_template import ChatTemplate

BASE, OTHER = "zy"
_DIGITS = "abcdefghijklmnop"
"""Letters that number the texts. They differ from BASE."""
SHORTENED_MAX = 8
"""How many texts of a role may make a prompt shorter, although it has them."""
_VISIBLE = re.compile(r"\S+")
_ALPHANUMERIC = re.compile(r"[A-Za-z0-9]+")
_SWITCH = re.compile(r"/[a-z_]+")


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


def keeping_switches(template: ChatTemplate) -> Disguise:
    """The disguise that keeps the words with which users of the template switch reasoning, such as "/no_think"."""
    switches = frozenset(literal for literal in template.literals if _SWITCH.fullmatch(literal))
    words = _one_of(switches)
    return Disguise(_VISIBLE, words and re.compile(rf"(?<!\S){words.pattern}(?!\S)"))


def keeping_reasoning(template: ChatTemplate) -> Disguise:
    """The disguise that keeps the begins and ends of reasoning."""
    return Disguise(_VISIBLE, _one_of(frozenset(template.reasoning) | frozenset(template.reasoning.values())))


def keeping_signs(template: ChatTemplate) -> Disguise:
    """The disguise that also keeps all characters that JSON or HTML would escape."""
    return Disguise(_ALPHANUMERIC, _one_of(template.literals))


@dataclass(frozen=True, slots=True)
class Shown:
    """What a prompt has of the texts of its chat.

    `counts`: text → how many of its replaced characters, in the order of the prompt. Texts with none are left out.
    `runs`: each run of such characters as its text's number, and how many other characters precede it.
    `after`: the number of characters after the last run.
    """

    counts: dict[int, int]
    runs: tuple[tuple[int, int], ...]
    after: int


def disguised(chat: Chat, disguise: Disguise, letters: Sequence[str], begins: Sequence[int]) -> list[str]:
    """The texts of the chat, each in its letter. `begins`: how many characters of each to leave as they are."""
    return [
        text[:begin] + disguise.of(text[begin:], letter)
        for text, letter, begin in zip(chat.texts, letters, begins, strict=True)
    ]


def shown(chat: Chat, disguise: Disguise, begins: Sequence[int] | None = None) -> Shown:
    """What the prompt has of the texts in disguise. `begins`: see `disguised`.

    Raises INVALID_ARGUMENT if the template refuses the disguised messages, or goes by their letters.
    """
    numbers = range(len(chat.texts))
    digits = range(max(1, -(-len(numbers).bit_length() // 4)))
    lines = [(BASE, *(_DIGITS[number >> 4 * digit & 15] for digit in digits)) for number in numbers]
    prompts = [
        chat.render(disguised(chat, disguise, letters, begins or [0] * len(numbers))).lower()
        for letters in zip(*lines, strict=True)
    ]
    if len(set(map(len, prompts))) > 1:
        raise invalid("messages", "the model's chat template treats some letters differently from others")
    number_of = {line: number for number, line in enumerate(lines)}
    owners = list(map(number_of.get, zip(*prompts, strict=True)))
    runs, gap = [], 0
    for number, run in groupby(owners):
        if number is None:
            gap = sum(1 for _ in run)
        else:
            runs.append((number, gap))
            gap = 0
    return Shown({number: count for number, count in Counter(owners).items() if number is not None}, tuple(runs), gap)


def first_shortened(chat: Chat, base: Sequence[str], given: Sequence[str], numbers: Sequence[int]) -> int | None:
    """The first of some texts that makes the prompt shorter and is not in it, if it is given in place of the base.

    Texts of equal lengths make prompts of equal lengths, unless the template changes them. Blanks are not counted.
    Raises INVALID_ARGUMENT if the template refuses one of these chats.
    """

    def prompt_with(count: int) -> str:
        replaced = frozenset(rest[:count])
        return chat.render(
            [(given if number in known or number in replaced else base)[number] for number in everything]
        )

    everything, known, rest = range(len(base)), set[int](), list(numbers)
    for _ in range(SHORTENED_MAX):
        length = _visible(prompt_with(0))
        if _visible(prompt_with(len(rest))) >= length:
            return None
        count = bisect_left(range(1, len(rest)), True, key=lambda count: _visible(prompt_with(count)) < length) + 1
        text = given[rest[count - 1]].strip()
        if prompt_with(count).count(text) <= prompt_with(count - 1).count(text):
            break
        known.update(rest[:count])  # The template has left out something else, such as an end that the text has itself.
        rest = rest[count:]
    return rest[count - 1]


def _visible(text: str) -> int:
    return len("".join(text.split()))


def _one_of(words: frozenset[str]) -> re.Pattern[str] | None:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if words else None
