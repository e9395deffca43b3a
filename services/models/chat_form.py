"""Gives messages to a template in the form that it can read, and refuses those that it would leave out.

Some templates take a content as a string, some as a list of parts, and some leave out messages of roles that they do
not know. A text that the template leaves out would be missing from the prompt in silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache

from services.core.errors import Failure, invalid, quoted
from services.core.request import ROLES, Message
from services.models.chat import Chat
from services.models.chat_template import ChatTemplate
from services.models.disguise import (
    BASE,
    FULL,
    OTHER,
    Disguise,
    disguised,
    first_shortened,
    keeping_literals,
    keeping_switches,
    shown,
)

SHAPES_KEPT = 256
"""How many shapes of conversations are remembered with the form that suits their template."""
_SAMPLE = BASE * 8


@dataclass(frozen=True, slots=True)
class Form:
    """How to give messages of one shape to a template.

    `parts`: see `Chat`. `runs`, `after`: what the prompt of a sample has, see `Shown`. `hidden`: the texts that it does
    not have.
    """

    parts: frozenset[int]
    runs: tuple[tuple[int, int], ...]
    after: int
    hidden: frozenset[int]


def prompt_of(template: ChatTemplate, messages: Sequence[Message]) -> tuple[Chat, str]:
    """The messages as the template can read them, and the prompt.

    Raises INVALID_ARGUMENT if the template refuses them, or leaves out a text.
    """
    form = _form_of(template, "".join(map(_shape_of, messages)), date.today())
    texts = (*(message.content for message in messages), *(message.name for message in messages))
    chat = Chat(template, tuple(message.role for message in messages), texts, form.parts)
    prompt = chat.render()
    if not _is_complete(chat, form, prompt):
        _check_contents(chat, prompt)
        _check_lengths(chat)
    if any(chat.names):
        _check_names(chat, form.hidden)
    return chat, prompt


def _shape_of(message: Message) -> str:
    """All that a template usually goes by: the role, and whether there are a name and a content."""
    return chr(ROLES.index(message.role) * 4 + bool(message.name) * 2 + bool(message.content.strip()))


@lru_cache(maxsize=SHAPES_KEPT)
def _form_of(template: ChatTemplate, shape: str, today: date) -> Form:
    """The form in which the template shows all contents; if there is none, the one in which it shows the most.

    `today`: some templates write the date, whose length is a part of the form.
    """
    codes = list(map(ord, shape))
    contents = tuple(_SAMPLE * (code & 1) for code in codes)
    names = tuple(_SAMPLE * (code >> 1 & 1) for code in codes)
    roles = tuple(ROLES[code >> 2] for code in codes)

    def tried(parts: frozenset[int]) -> Form:
        chat = Chat(template, roles, contents + names, parts)
        try:
            sample = shown(chat, FULL)
        except Failure:  # A template that refuses the sample shows nothing of it, not even empty texts.
            return Form(parts, (), 0, frozenset(range(len(chat.texts))))
        given = {number for number, text in enumerate(chat.texts) if text}
        return Form(parts, sample.runs, sample.after, frozenset(given.difference(sample.counts)))

    def hidden_contents(form: Form) -> frozenset[int]:
        return frozenset(number for number in form.hidden if number < len(roles))

    strings = tried(frozenset())
    if not hidden_contents(strings):
        return strings
    lists = tried(frozenset(range(len(roles))))
    mixed = tried(hidden_contents(strings))
    return min(strings, lists, mixed, key=lambda form: len(hidden_contents(form)))


def _is_complete(chat: Chat, form: Form, prompt: str) -> bool:
    """Whether the prompt is that of the sample with the texts in its place, but for blanks around them."""
    end = room = 0
    for number, gap in form.runs:
        text = chat.texts[number][chat.begin_of(number) :].strip()
        around = len(chat.texts[number]) - len(text)
        begin = prompt.find(text, end + gap, end + gap + room + around + len(text))
        if begin < 0:
            return False
        end, room = begin + len(text), around
    is_whole = 0 <= len(prompt) - end - form.after <= room
    return is_whole and all(number >= len(chat.roles) for number in form.hidden)


def _check_contents(chat: Chat, prompt: str) -> None:
    """Check that the prompt has all contents, however the template writes them. Raises INVALID_ARGUMENT."""
    keeping, switches = keeping_literals(chat.template), keeping_switches(chat.template)
    begins = chat.begins
    by_switches, by_keeping = _counts(chat, switches, begins), _counts(chat, keeping, begins)
    for number, role in enumerate(chat.roles):
        expected = chat.texts[number][begins[number] :].strip()
        needed = keeping.count(expected)
        if by_keeping is not None and needed:
            is_shown = by_keeping.get(number, 0) >= needed
        elif by_switches is not None and expected:  # The template looks for all of it, such as for the name of a role.
            is_shown = by_switches.get(number, 0) >= switches.count(expected)
        else:
            is_shown = expected in prompt
        if not is_shown and by_keeping and by_keeping.get(number):
            raise _left_out_in_part(number, role)
        if not is_shown:
            detail = f"the model's chat template leaves messages[{number}] out, of role {role!r}"
            raise invalid(f"messages[{number}]", f"{detail}: {_advice(role)}")


def _check_lengths(chat: Chat) -> None:
    """Check that the template deletes nothing that it looks for, such as tags of HTML. Raises INVALID_ARGUMENT.

    Letters in place of texts hide that from the template, so the prompt is longer with them.
    """
    begins = chat.begins
    base, kept, other = (
        disguised(chat, disguise, letter * len(chat.texts), begins)
        for disguise, letter in (
            (keeping_switches(chat.template), BASE),
            (keeping_literals(chat.template), BASE),
            (keeping_literals(chat.template), OTHER),
        )
    )
    looked_for = [number for number, text in enumerate(kept) if text != base[number]]
    for given, numbers in ((chat.texts, range(len(chat.roles))), (other, looked_for)):
        for role in sorted(set(chat.roles)):
            of_role = [number for number in numbers if number < len(chat.roles) and chat.roles[number] == role]
            try:
                number = first_shortened(chat, base, given, of_role) if of_role else None
            except Failure:
                continue  # The template decides by the letters of its texts.
            if number is not None:
                raise _left_out_in_part(number, role)


def _left_out_in_part(number: int, role: str) -> Failure:
    path = f"messages[{number}].content"
    detail = f"the model's chat template leaves a part of {path} out, of role {role!r}"
    return invalid(path, f"{detail}: {_advice(role)}")


def _counts(chat: Chat, disguise: Disguise, begins: Sequence[int]) -> dict[int, int] | None:
    """See `Shown`. None if they cannot be known, because the template decides by the letters of its texts."""
    try:
        return shown(chat, disguise, begins).counts
    except Failure:
        return None


def _advice(role: str) -> str:
    return "write its text into a message of the user" if role != "user" else "write it in another way"


def _check_names(chat: Chat, hidden: frozenset[int]) -> None:
    """Check that the prompt tells the speakers of each role apart, if their names do. Raises INVALID_ARGUMENT."""
    first: dict[str, str] = {}
    for number, (role, name) in enumerate(zip(chat.roles, chat.names, strict=True)):
        if name and number + len(chat.roles) in hidden and name != first.setdefault(role, name):
            speakers = f"{quoted(first[role])} and {quoted(name)} of role {role!r}"
            path = f"messages[{number}].name"
            detail = f"the model's chat template leaves {path} out, so that {speakers} would look like one speaker"
            raise invalid(path, f"{detail}: write the names into the contents")
