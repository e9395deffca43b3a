"""What it costs to turn a prompt into token ids: inside the frontend's process, and in a helper process.

    python -m bench.prompts [--rounds 20]

Needs the cached model `smollm2`. Rows: a splitter that loops, and one that recurses, with the same vocabulary. Columns:
the least time of one prompt after the other, by its length in characters, because other processes only add to it.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

from services.core.model_card import ModelCard, TokenizerRef
from services.isolation.pool import HelperPool
from services.models.download import resolve
from services.models.prompt import prompt_token_ids
from services.models.prompt_helper import LOADER, content_of, ids_of, job_of
from services.models.tokenizers import load_tokenizer
from services.models.tokenizers.gguf import tokenizer_content
from services.runtime.loop import run_on_loop

LENGTHS = (100, 1_000, 8_000, 32_000)
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
REF = TokenizerRef("gguf", "-")
CARD = ModelCard(model="m", engine="llamacpp", context_length=65_536, vocab_size=1, tokenizer=REF)


async def microseconds(work: Callable[[str], Awaitable[object]], text: str, rounds: int) -> float:
    """The least time of one call."""
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await work(text)
        taken.append(time.perf_counter() - begun)
    return min(taken) * 1e6


async def main(rounds: int) -> None:
    content = tokenizer_content(resolve("smollm2"))
    texts = [(TEXT * (length // len(TEXT) + 1))[:length] for length in LENGTHS]
    print("| splitter | way |", " | ".join(f"{length:,}" for length in LENGTHS), "| µs a prompt")
    for splitter in (b"smollm", b"tekken"):
        before, key, after = content.partition(b"tokenizer.ggml.pre")
        changed = before + key + after.replace(b"smollm", splitter, 1)
        tokenizer = load_tokenizer(REF, changed)
        pool = HelperPool("the tokeniser", LOADER, content_of(REF, changed))

        async def inside(text: str) -> object:
            return prompt_token_ids(CARD, tokenizer, text)  # noqa: B023 (called in this round only)

        async def in_a_thread(text: str) -> object:
            return await asyncio.to_thread(prompt_token_ids, CARD, tokenizer, text)  # noqa: B023

        async def in_a_helper(text: str) -> object:
            return ids_of(await pool.run(job_of(CARD, text)))  # noqa: B023

        try:
            await in_a_helper(TEXT)
            for way in (inside, in_a_thread, in_a_helper):
                cells = [f"{await microseconds(way, text, rounds):,.0f}" for text in texts]
                print(f"| {splitter.decode()} | {way.__name__.replace('_', ' ')} |", " | ".join(cells), "|")
        finally:
            await pool.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    run_on_loop(main(parser.parse_args().rounds))
