"""The prompt in front of each answer, for clients of completions that ask for it."""

from collections.abc import Callable, Sequence

from services.request import Request


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
