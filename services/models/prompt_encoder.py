"""Turns prompts into token ids: at once where that is quick and known to be safe, otherwise in a helper process.

| prompt | at once |
| --- | --- |
| text | up to `inside_characters_max` of the tokeniser, see `tokenizers/inside.py` |
| chat | the same, and `_renders_inside` |

Everything else goes to a helper, rendering and tokenising in one job: a crash, endless work or too much memory is a
refusal of that prompt.
"""

import asyncio
from collections.abc import Callable

from services.core.errors import Failure, invalid
from services.core.model_card import ModelCard, TokenizerRef
from services.core.request import Message
from services.isolation.losses import HelperLost, Loss
from services.isolation.pool import HelperPool
from services.models.prompt import prompt_token_ids
from services.models.prompt_helper import LOADER, Prompt, content_of, ids_of, job_of
from services.models.template_inside import MESSAGES_INSIDE_MAX, renders_inside
from services.models.tokenizers import Tokenizer, load_tokenizer
from services.models.tokenizers.bounded import BoundedTokenizer, TooLongInside
from services.models.tokenizers.inside import CHARACTERS_INSIDE_MAX


class PromptEncoder:
    """A tokeniser, and the helper processes that share it. `close` it."""

    @classmethod
    async def load(
        cls, ref: TokenizerRef, content: bytes, on_lost: Callable[[Loss], object] = lambda _: None
    ) -> "PromptEncoder":
        """Load a tokeniser, first in a process of its own. Raises Failure. `on_lost`: called with each helper lost."""
        pool = HelperPool("the model's tokeniser", LOADER, content_of(ref, content), on_lost=on_lost)
        try:
            if ref.kind != "bytes":  # Our own code: its fork server starts when it is needed.
                await pool.load()
            tokenizer = await asyncio.to_thread(load_tokenizer, ref, content)
        except BaseException:
            await pool.close()
            raise
        return cls(tokenizer, pool)

    def __init__(self, tokenizer: Tokenizer, pool: HelperPool) -> None:
        self.tokenizer = tokenizer
        self._inside = BoundedTokenizer(tokenizer)
        self._pool = pool

    async def token_ids(
        self, card: ModelCard, prompt: Prompt, characters: int, *, parses_contents: bool = False
    ) -> tuple[int, ...]:
        """The ids of a prompt, see `prompt_token_ids`. `characters`: of all prompts of its request together.

        Raises INVALID_ARGUMENT, and OVERLOADED if too many prompts wait for a helper.
        """
        if characters <= CHARACTERS_INSIDE_MAX and (isinstance(prompt, str) or _renders_inside(card, prompt)):
            try:
                return prompt_token_ids(card, self._inside, prompt, parses_contents=parses_contents)
            except TooLongInside:
                pass
        try:
            return ids_of(await self._pool.run(job_of(card, prompt, parses_contents=parses_contents)))
        except HelperLost as lost:
            raise _refusal(prompt, lost) from None

    async def close(self) -> None:
        """End all helper processes."""
        await self._pool.close()


def _renders_inside(card: ModelCard, messages: tuple[Message, ...]) -> bool:
    return len(messages) <= MESSAGES_INSIDE_MAX and renders_inside(card.chat_template, card.bos_token, card.eos_token)


def _refusal(prompt: Prompt, lost: HelperLost) -> Failure:
    name = "prompt" if isinstance(prompt, str) else "messages"
    detail = f"{name} cannot be turned into tokens: the process that did it {lost.how}; shorten it, or change its text"
    return invalid(name, detail)
