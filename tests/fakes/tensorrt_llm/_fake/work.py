"""Writes the engine's own count of computed tokens to a file, for tests that run it in another process."""

import os


class WorkFile:
    """Two lines in Prometheus' format, rewritten after each step. `path`: "" for none."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if path else None
        self.read_count = 0
        self.drawn_count = 0

    def write(self) -> None:
        """Write both lines in one call. The numbers only grow, so no part of the old text remains."""
        if self._file is not None:
            prompts, answers = (
                f"tllm_fake_prompt_tokens {self.read_count}",
                f"tllm_fake_answer_tokens {self.drawn_count}",
            )
            os.pwrite(self._file, f"{prompts}\n{answers}\n".encode(), 0)
