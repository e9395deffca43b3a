"""The tokens of an answer that the client has, with which it can go on after the loss of the whole plane."""

from typing import Any


class Journal:
    """Kept for streams whose user asks for `return_token_ids`."""

    def __init__(self, body: dict[str, Any], *, is_chat: bool) -> None:
        """`body`: of the request."""
        self._body = body
        self._is_chat = is_chat
        self._seed: int | None = None
        count = _choice_count(body)
        brought = body.get("generated_token_ids")
        per_choice = [brought] if count == 1 and _is_flat(brought) else brought
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._is_ended = [False] * count
        if isinstance(per_choice, list) and len(per_choice) == count:
            self._tokens = [list(tokens or []) for tokens in per_choice]
            self._is_ended = [tokens is None for tokens in per_choice]

    @property
    def is_complete(self) -> bool:
        """Whether the client has the ends of all choices."""
        return all(self._is_ended)

    @property
    def can_continue(self) -> bool:
        """Whether the rest of the answer can be had with these tokens.

        Not if the draws are unknown, nor with the log probabilities of completions, which come later than the tokens.
        """
        body = self._body
        has_draws = self._seed is not None or body.get("seed") is not None or body.get("temperature") == 0
        return has_draws and not self.is_complete and (self._is_chat or body.get("logprobs") is None)

    def told_seed(self, seed: str | None) -> None:
        """The server has used this seed."""
        if seed is not None and seed.isdecimal():
            self._seed = int(seed)

    def add(self, chunk: dict[str, Any]) -> None:
        """Note the tokens in the data of an event."""
        for choice in chunk.get("choices") or ():
            index = choice.get("index", 0)
            if index < len(self._tokens):
                self._tokens[index] += choice.get("token_ids") or ()
                self._is_ended[index] |= choice.get("finish_reason") is not None

    def continuation(self) -> dict[str, Any]:
        """The body of the request for the rest."""
        tokens = [None if ended else ids for ids, ended in zip(self._tokens, self._is_ended, strict=True)]
        body = {**self._body, "generated_token_ids": tokens[0] if len(tokens) == 1 else tokens}
        return body if self._seed is None else {**body, "seed": self._seed}


def _choice_count(body: dict[str, Any]) -> int:
    n, prompt = body.get("n"), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return prompts * (n if isinstance(n, int) and n > 0 else 1)


def _is_flat(tokens: Any) -> bool:
    return isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
