"""What a request must be answered with: computed from the mocker's function of request and seed, without a plane."""

from dataclasses import dataclass
from functools import cache

from services.core.request import FinishReason, Request, Sampling, Stop
from services.models.tokenizers.byte_level import ByteTokenizer
from services.worker.engines.mocker.sequence import MockerSequence
from simulation.scenario.plan import RequestPlan

CONTEXT_LENGTH = 131_072


@dataclass(frozen=True)
class Expected:
    """One choice. `text`: as the client sees it. `finish`: the finish reason. `token_ids`: of the whole answer."""

    token_ids: tuple[int, ...]
    text: str
    finish: str


@cache
def expected_choice(plan: RequestPlan, index: int) -> Expected:
    """The undisturbed answer. `index`: in the whole answer, which has `n` choices for each prompt."""
    prompt, choice = tuple(plan.prompts[index // plan.n].encode()), index % plan.n
    request = Request(
        model="mocker",
        token_ids=prompt,
        choice=choice,
        sampling=Sampling(temperature=plan.temperature, seed=plan.seed),
        stop=Stop(max_tokens=plan.max_tokens),
        logprobs=plan.logprobs,
    )
    sequence = MockerSequence(0, request)
    token_ids: list[int] = []
    finish: FinishReason | None = None
    while finish is None:
        output = sequence.step(CONTEXT_LENGTH)
        token_ids += output.token_ids
        finish = output.finish
        if plan.stop and (cut := _stopped(token_ids, plan.stop)) is not None:
            return Expected(tuple(token_ids), cut, "stop")
    return Expected(tuple(token_ids), _text(token_ids), "length" if finish is FinishReason.LENGTH else "stop")


def _text(token_ids: list[int]) -> str:
    return b"".join(ByteTokenizer.token_bytes[token] for token in token_ids).decode(errors="replace")


def _stopped(token_ids: list[int], strings: tuple[str, ...]) -> str | None:
    """The text before the first stop string, if the last token completes one."""
    text = b"".join(ByteTokenizer.token_bytes[token] for token in token_ids).decode(errors="ignore")
    found = [index for string in strings if (index := text.find(string)) >= 0]
    return text[: min(found)] if found else None
