"""What the engine has computed so far, by its own word, for whoever looks from outside."""

import os


class WorkFile:
    """Two lines as Prometheus has them, written anew at each step. path: "" for none."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if path else None
        self.read_count = 0
        self.drawn_count = 0

    def write(self) -> None:
        """In one go: numbers only grow, so nothing is left of the text before."""
        if self._file is not None:
            prompts, answers = (
                f"tllm_fake_prompt_tokens {self.read_count}",
                f"tllm_fake_answer_tokens {self.drawn_count}",
            )
            os.pwrite(self._file, f"{prompts}\n{answers}\n".encode(), 0)
