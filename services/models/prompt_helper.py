"""The work of helper processes that turn prompts into token ids, and the load that comes before it.

A tokeniser comes from a worker and may be damaged: with some files of a hundred bytes a library allocates all memory
and aborts. So the fork server loads it, and tries it on a sample, before the parent process loads it as well.
"""

import pickle
from array import array
from collections.abc import Callable

from services.core.model_card import ModelCard, TokenizerRef
from services.core.request import Message
from services.models.prompt import prompt_token_ids
from services.models.tokenizers import load_tokenizer

LOADER = f"{__name__}:load"
ID_TYPE = "I"
"""The type of a token id in an answer, for the module `array`."""
_SCRIPTS = "a" * 256 + "".join(map(chr, range(0x20, 0x250))) + "漢字 한국어 e\u0301\n\n\t  🎉👩‍👩‍👧 1234567890"
_BYTES = "".join(
    map(chr, (*range(0x80), *range(0x80, 0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 4096)))
)
_SAMPLE = _SCRIPTS + _BYTES
"""Text in many scripts, and with every byte that UTF-8 has: a tokeniser that fails on either is refused at the load."""

Prompt = str | tuple[Message, ...]


def content_of(ref: TokenizerRef, content: bytes) -> bytes:
    """What `load` loads."""
    return pickle.dumps((ref, content))


def job_of(card: ModelCard, prompt: Prompt, *, parses_contents: bool = False) -> bytes:
    """A job for the helper. Pickled, because a text may have characters without an encoding."""
    return pickle.dumps((card, prompt, parses_contents))


def ids_of(answer: bytes) -> tuple[int, ...]:
    """The token ids that a helper has answered with."""
    return tuple(array(ID_TYPE, answer))


def load(content: bytes) -> Callable[[bytes], bytes]:
    """Load a tokeniser, and return the work of a helper. Raises Failure if it does not load or fails on the sample."""
    ref, tokenizer_content = pickle.loads(content)
    tokenizer = load_tokenizer(ref, tokenizer_content)
    for add_special in (True, False):
        tokenizer.encode(_SAMPLE, add_special=add_special)

    def work(job: bytes) -> bytes:
        card, prompt, parses_contents = pickle.loads(job)
        return array(ID_TYPE, prompt_token_ids(card, tokenizer, prompt, parses_contents=parses_contents)).tobytes()

    return work
