"""The work of a helper process: the grammar of one guided answer.

A step is bounded more tightly than a compilation, because an answer has many. The memory of a helper is bounded once,
for all of its jobs together.
"""

import resource
import signal

from services.worker.guided.explain import failing
from services.worker.guided.grammar import Grammar, GrammarBuilder
from services.worker.guided.guide_jobs import Step, decode_compilation, decode_token, decode_vocabulary, encode_step
from services.worker.guided.refusals import unusable

STEP_CPU_S_MAX = 1.0
"""Processor time for one token of a guided answer. Most take less than a millisecond."""


class GuideWork:
    """Holds the grammar of one answer, once the first job has compiled it."""

    def __init__(self, builder: GrammarBuilder) -> None:
        self._builder = builder
        self._grammar: Grammar | None = None
        self._kind = ""

    def __call__(self, job: bytes) -> bytes:
        """Do a job. Raises Failure if the text is refused, or does not match the answer."""
        try:
            return encode_step(self._do(job))
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            # A panic in Rust.
            raise unusable(self._kind, f"{failing(error)}; simplify it") from error

    def _do(self, job: bytes) -> Step:
        if self._grammar is None:
            self._bound_memory()
            guided, generated = decode_compilation(job)
            self._kind = guided.kind
            self._grammar = self._builder.build(guided, generated)
        else:
            signal.setitimer(signal.ITIMER_PROF, STEP_CPU_S_MAX)  # The helper has set a higher bound, for any job.
            self._grammar.accept_token(decode_token(job))
        return Step(self._grammar.token_mask(), self._grammar.is_complete)

    @staticmethod
    def _bound_memory() -> None:
        """Turn the limit that the helper has set for this job into one for all of its jobs."""
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def load(content: bytes) -> GuideWork:
    """Load a vocabulary. Called once, in the process that forks the helpers."""
    return GuideWork(GrammarBuilder(*decode_vocabulary(content)))
