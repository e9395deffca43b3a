"""Gives messages to a template in the form that it can read, and refuses those that it would leave out.

Some templates take a content as a string, some as a list of parts, and some leave out messages of roles that they do
not know. A text that the template leaves out would be missing from the prompt in silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from services.core.errors import Failure, invalid, quoted
from services.core.request import ROLES, Message
from services.models.chat import Chat
from services.models.chat_template import ChatTemplate
from services.models.disguise import BASE, FULL, Disguise, keeping_literals, shown

SHAPES_KEPT = 256
"""How many shapes of conversations are remembered with the form that suits their template."""
END_OF_REASONING = "</think>"
"""Templates leave out an assistant's text up to here: models expect no earlier reasoning in a prompt."""

_SAMPLE = BASE * 8


@dataclass(frozen=True, slots=True)
class Form:
    """How to give messages of one shape to a template.

    `parts`: see `Chat`. `order`: the texts that the prompt has, in its order. `hidden`: those that it does not have.
    """

    parts: frozenset[int]
    order: tuple[int, ...]
    hidden: frozenset[int]


def prompt_of(template: ChatTemplate, messages: Sequence[Message]) -> tuple[Chat, str]:
    """The messages as the template can read them, and the prompt.

    Raises INVALID_ARGUMENT if the template refuses them, or leaves out a text.
    """
    form = _form_of(template, "".join(map(_shape_of, messages)))
    texts = (*(message.content for message in messages), *(message.name for message in messages))
    chat = Chat(template, tuple(message.role for message in messages), texts, form.parts)
    prompt = chat.render()
    if not _is_complete(chat, form, prompt):
        _check_contents(chat, prompt)
    if any(chat.names):
        _check_names(chat, form.hidden)
    return chat, prompt


def _shape_of(message: Message) -> str:
    """All that a template usually goes by: the role, and whether there are a name and a content."""
    return chr(ROLES.index(message.role) * 4 + bool(message.name) * 2 + bool(message.content.strip()))


@lru_cache(maxsize=SHAPES_KEPT)
def _form_of(template: ChatTemplate, shape: str) -> Form:
    """The form in which the template shows all contents; if there is none, the one in which it shows the most."""
    codes = list(map(ord, shape))
    contents = tuple(_SAMPLE * (code & 1) for code in codes)
    names = tuple(_SAMPLE * (code >> 1 & 1) for code in codes)
    roles = tuple(ROLES[code >> 2] for code in codes)

    def tried(parts: frozenset[int]) -> Form:
        chat = Chat(template, roles, contents + names, parts)
        try:
            order = tuple(shown(chat, FULL))
        except Failure:
            order = ()  # A template that refuses the sample shows nothing of it.
        given = {number for number, text in enumerate(chat.texts) if text}
        return Form(parts, order, frozenset(given.difference(order)))

    def hidden_contents(form: Form) -> frozenset[int]:
        return frozenset(number for number in form.hidden if number < len(roles))

    strings = tried(frozenset())
    if not hidden_contents(strings):
        return strings
    lists = tried(frozenset(range(len(roles))))
    mixed = tried(hidden_contents(strings))
    return min(strings, lists, mixed, key=lambda form: len(hidden_contents(form)))


def _is_complete(chat: Chat, form: Form, prompt: str) -> bool:
    """Whether the prompt has all contents as they are, but for blanks around them, in the form's order."""
    end = 0
    for number in form.order:
        if number < len(chat.roles):
            text = chat.texts[number][_begin(chat, number) :].strip()
            begin = prompt.find(text, end)
            if begin < 0:
                return False
            end = begin + len(text)
    return all(number >= len(chat.roles) for number in form.hidden)


def _begin(chat: Chat, number: int) -> int:
    """Where in a text that begins which the prompt must have."""
    is_answer = number < len(chat.roles) and chat.roles[number] == "assistant"
    found = chat.texts[number].rfind(END_OF_REASONING) if is_answer else -1
    return 0 if found < 0 else found + len(END_OF_REASONING)


def _check_contents(chat: Chat, prompt: str) -> None:
    """Check that the prompt has all contents, however the template writes them. Raises INVALID_ARGUMENT."""
    keeping = keeping_literals(chat.template)
    begins = [_begin(chat, number) for number in range(len(chat.texts))]
    by_full, by_keeping = _shown(chat, FULL), _shown(chat, keeping, begins)
    for number, role in enumerate(chat.roles):
        expected = chat.texts[number][begins[number] :].strip()
        needed = keeping.count(expected)
        if by_keeping is not None and needed:
            is_shown = by_keeping.get(number, 0) >= needed
        elif by_full is not None and expected:  # The template looks for all of it, such as for the name of a role.
            is_shown = by_full.get(number, 0) >= FULL.count(chat.texts[number])
        else:
            is_shown = expected in prompt
        if not is_shown:
            what = "a part of " if by_keeping and by_keeping.get(number) else ""
            detail = f"the model's chat template leaves {what}messages[{number}] out, of role {role!r}"
            raise invalid(f"messages[{number}]", f"{detail}: {_advice(role)}")


def _shown(chat: Chat, disguise: Disguise, begins: Sequence[int] | None = None) -> dict[int, int] | None:
    """See `shown`. None if it cannot be known, because the template decides by the letters of its texts."""
    try:
        return shown(chat, disguise, begins)
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
