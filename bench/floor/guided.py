"""The cost of guided answers on llama.cpp: the time to the first token, and for each further one.

    python -m bench.floor.guided [ANSWERS]

An answer starts after another has ended, on an engine without clients. The unguided figures are those of the same
prompt: what remains is the price of the guide.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence

from services.core.request import Guided, GuidedKind, Request, Sampling, Stop
from services.models.download import resolve
from services.runtime.loop import run_on_loop
from services.worker.engine import Output
from services.worker.engines.llamacpp import LlamaCppConfig, LlamaCppEngine

PROMPT = (504, 3575, 282, 4649, 314)
TOKENS = 40
ANSWERS = 30
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["city", "people", "tags"],
}
FORMS: dict[str, Guided | None] = {
    "not guided": None,
    "a choice": Guided(GuidedKind.CHOICE, ("yes", "no")),
    "a schema": Guided(GuidedKind.JSON_SCHEMA, (json.dumps(SCHEMA),)),
    "an expression": Guided(GuidedKind.REGEX, ("[a-z ]{400}",)),
}


class Timed:
    """An engine, and when each token of the current answer came."""

    def __init__(self) -> None:
        self.engine = LlamaCppEngine(LlamaCppConfig(path=resolve("smollm2"), served_model_name="tiny"))
        self._key = 0
        self._times: list[float] = []
        self._ended = asyncio.Event()

    def emit(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            assert output.failure is None, output.failure
            self._times += [time.perf_counter()] * len(output.token_ids)
            if output.finish is not None:
                self._ended.set()

    async def answer(self, guided: Guided | None) -> tuple[float, float]:
        """Return the seconds to the first token, and for each further one."""
        self._times, self._ended = [], asyncio.Event()
        self._key += 1
        start = time.perf_counter()
        sampling = Sampling(temperature=0)
        self.engine.submit(
            self._key,
            Request(model="tiny", token_ids=PROMPT, guided=guided, sampling=sampling, stop=Stop(max_tokens=TOKENS)),
        )
        await self._ended.wait()
        first, last = self._times[0], self._times[-1]
        return first - start, (last - first) / max(1, len(self._times) - 1)


async def measure(answers: int) -> None:
    timed, ready = Timed(), asyncio.Event()
    run = asyncio.get_running_loop().create_task(timed.engine.run(timed.emit, ready))
    start = time.perf_counter()
    await ready.wait()
    print(f"ready after {time.perf_counter() - start:.2f} s")
    first, _ = await timed.answer(FORMS["a choice"])
    print(f"first guided answer, at once: {first * 1e3:.0f} ms to the first token")
    for name, guided in FORMS.items():
        results = [await timed.answer(guided) for _ in range(answers)]
        to_first, per_token = (statistics.median(values) * 1e3 for values in zip(*results, strict=True))
        print(f"{name}: {to_first:.1f} ms to the first token, {per_token:.1f} ms for each further one")
    run.cancel()
    await asyncio.wait([run])


if __name__ == "__main__":
    run_on_loop(measure(int(sys.argv[1]) if sys.argv[1:] else ANSWERS))
