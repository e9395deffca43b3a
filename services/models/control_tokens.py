"""Keeps control tokens that contents spell out from becoming control tokens: with them, a user could forge a turn."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from services.core.errors import Failure, invalid
from services.core.request import Message
from services.models.chat import Chat
from services.models.chat_form import prompt_of
from services.models.chat_template import TEMPLATES_KEPT, ChatTemplate
from services.models.disguise import keeping_literals, keeping_reasoning, keeping_signs, keeping_switches
from services.models.tokenizers import Tokenizer
from services.models.tokenizers.spellings import Spellings, one_of_characters

SPELLED_MAX = 256
"""With more control tokens in its texts, a prompt is not first encoded as if they were none."""

_SAMPLES = ("system user assistant user", "user assistant tool", "user")
"""Conversations that show which tokens a template writes."""


class ControlTokens:
    """The tokens that only the template may write: all without text, and those with text that the template uses.

    A vocabulary may have further added tokens, such as HTML's tags. They stay what they are in every text.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._spellings = Spellings(tokenizer.added_tokens)
        written = template.source + "".join(_sample_prompts(template))
        names = [
            name
            for name, token in tokenizer.added_tokens.items()
            if not tokenizer.token_bytes[token] or name in written
        ]
        self._ids = frozenset(tokenizer.added_tokens[name] for name in names)
        marks = (*template.reasoning, *template.reasoning.values())
        self._reasoning = frozenset(tokenizer.added_tokens[mark] for mark in marks if mark in names)
        self._ends = one_of_characters({name[0] for name in names} | {name[-1] for name in names})
        self._names = "\n".join(names)
        self._characters_max = max(map(len, names), default=0)

    def may_be_in(self, texts: Iterable[str]) -> bool:
        """Whether one of these tokens may have a character of the texts. Cheap, and often False."""
        if not self._ids:
            return False
        return self._tokenizer.rewrites_text or any(map(self._may_be_in, texts))

    def _may_be_in(self, text: str) -> bool:
        if self._ends.search(text):
            return True
        inner = text.strip()  # As `user` in `<|user|>`, if a template writes a content between "<|" and "|>".
        return 0 < len(inner) < self._characters_max and inner in self._names

    def among(self, ids: Iterable[int]) -> list[int]:
        """Those of the ids that are control tokens."""
        return [token for token in ids if token in self._ids]

    def places_in(self, text: str) -> list[tuple[int, int]]:
        """Where the text spells control tokens, and which."""
        return [(begin, token) for begin, _, token in self._spellings.find(text) if token in self._ids]

    def are_reasoning(self, ids: Iterable[int]) -> bool:
        """Whether all of these tokens mark reasoning."""
        return self._reasoning.issuperset(ids)

    def spelled_in(self, text: str) -> list[int]:
        """The control tokens that the text spells."""
        return [token for _, token in self.places_in(text)]

    def count_in(self, texts: Iterable[str]) -> int:
        """How many control tokens the texts spell."""
        return sum(len(self.spelled_in(text)) for text in texts)

    def pieces(self, prompt: str, disguised: str) -> list[str | int] | None:
        """The prompt with its added tokens by id. `disguised`: the same prompt with other texts of equal lengths.

        None if the added tokens of both are not in the same places.
        """
        pieces: list[str | int] = []
        end = 0
        for begin, after, token in self._spellings.find(disguised):
            if prompt[begin:after] != disguised[begin:after]:
                return None
            pieces += [prompt[end:begin], token]
            end = after
        pieces.append(prompt[end:])
        return pieces if len(prompt) == len(disguised) else None


@lru_cache(maxsize=TEMPLATES_KEPT)
def control_tokens(tokenizer: Tokenizer, template: ChatTemplate) -> ControlTokens:
    """The control tokens of a vocabulary with a template."""
    return ControlTokens(tokenizer, template)


def ids_with_texts_as_text(chat: Chat, prompt: str, tokenizer: Tokenizer) -> Sequence[int]:
    """The ids of a prompt in which only the template writes control tokens.

    Raises INVALID_ARGUMENT if the template changes texts so much that its tokens cannot be told from theirs, or if the
    letters of texts decide which tokens it writes, or where.
    """
    control = control_tokens(tokenizer, chat.template)
    count = control.count_in(chat.texts)
    # llama.cpp's time grows with the square of the number of control tokens.
    ids = None if count > SPELLED_MAX else tokenizer.encode(prompt, add_special=False)
    first: list[int] | None = None
    cut: list[tuple[int, int]] | None = None
    accepted: Sequence[int] | None = None
    for texts in _disguises(chat):
        try:
            disguised = chat.render(texts)
        except Failure:
            continue  # The template looks into its texts: the next ones are more like them.
        places = control.places_in(disguised)
        own = [token for _, token in places]
        first = own if first is None else first
        pieces = control.pieces(prompt, disguised)
        if pieces is not None:
            cut = places if cut is None else cut
        kept = [token for text in texts for token in control.spelled_in(text)]
        if not _is_more_of(own, first, kept) or (
            pieces is not None and cut is not None and not set(cut) <= set(places)
        ):
            raise _undecided(chat, control)
        if accepted is not None or not control.are_reasoning(Counter(own) - Counter(first)):
            continue  # The disguise leaves further control tokens in texts, and the template keeps them.
        if ids is not None and control.among(ids) == own:
            accepted = ids
        elif pieces is not None and control.among(apart := tokenizer.encode_pieces(pieces)) == own:
            accepted = apart
        if accepted is not None and not count:
            break
    if accepted is None:
        raise _undecided(chat, control)
    return accepted


def _is_more_of(tokens: list[int], first: list[int], kept: list[int]) -> bool:
    """Whether these are the first tokens, and otherwise only some that a disguise keeps in texts."""
    return Counter(first) <= Counter(tokens) <= Counter(first + kept)


def _undecided(chat: Chat, control: ControlTokens) -> Failure:
    """The failure for a chat whose control tokens cannot be told from the template's: it names a message."""
    count = len(chat.roles)
    spelling = (
        number % count for number, text in enumerate(chat.texts) if not control.are_reasoning(control.spelled_in(text))
    )
    path = next((f"messages[{number}]" for number in spelling), "messages")
    detail = f"{path} spells control tokens of the model, and its chat template changes them, or goes by them"
    return invalid(path, f"{detail}: leave those out")


def _disguises(chat: Chat) -> Iterator[list[str]]:
    """The texts in disguise, from the best one to the one that templates notice least."""
    switches, reasoning = keeping_switches(chat.template), keeping_reasoning(chat.template)
    yield [switches.of(text) for text in chat.texts]
    yield [
        reasoning.of(text[:begin]) + switches.of(text[begin:])
        for text, begin in zip(chat.texts, chat.begins, strict=True)
    ]
    keeping = keeping_literals(chat.template)
    yield [keeping.of(text) for text in chat.texts]
    yield [keeping_signs(chat.template).of(text) for text in chat.texts]


def _sample_prompts(template: ChatTemplate) -> Iterable[str]:
    for roles in _SAMPLES:
        try:
            yield prompt_of(template, [Message(role, "z") for role in roles.split()])[1]
        except Failure:
            continue  # The template refuses such conversations, so its users cannot have them either.
