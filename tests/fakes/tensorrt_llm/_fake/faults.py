"""What goes wrong, and how fast things go: read from the environment when an LLM is made.

| variable | default | meaning |
| --- | --- | --- |
| TLLM_FAKE_STEP_MS | 1 | how long a step takes |
| TLLM_FAKE_LOAD_S | 0 | how long the constructor blocks |
| TLLM_FAKE_LOAD_ERROR | – | the constructor raises RuntimeError with this text |
| TLLM_FAKE_END_ODDS | 400 | an answer ends with a chance of one in so many at each token; 0: never |
| TLLM_FAKE_END_IN_TOKENS | 1 | is the end token among `token_ids`? To be found out on a GPU, so be ready for both |
| TLLM_FAKE_DRAWN_IN_LOGPROBS | 1 | does `logprobs` have the token that was drawn when it is no likely one? The same |
| TLLM_FAKE_CANCEL_STEPS | 2 | steps from an abort until it takes effect |
| TLLM_FAKE_ERROR_TOKEN | – | a prompt with this token fails with RequestError ... |
| TLLM_FAKE_ERROR_AFTER | 0 | ... after so many tokens |
| TLLM_FAKE_LOST_TOKEN | – | of a prompt with this token nothing is heard any more, while others go on ... |
| TLLM_FAKE_LOST_AFTER | 0 | ... after so many tokens |
| TLLM_FAKE_DEATH_TOKEN | – | a prompt with this token is the death of the engine, once it has been read |
| TLLM_FAKE_DEATH_STEPS | – | the engine dies after so many steps, whatever runs |
| TLLM_FAKE_DEATH | stored | how it dies: see Death |
| TLLM_FAKE_SHUTDOWN | ends | "hangs": shutdown waits for RELEASE, which nobody sets but a test of ours |
| TLLM_FAKE_STATS_MS | 200 | how often statistics are sampled |
| TLLM_FAKE_WORK_FILE | – | a file that has how many tokens were computed so far: see work.py |

Any other variable with the prefix is a ValueError.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

PREFIX = "TLLM_FAKE_"

RELEASE = threading.Event()
"""Lets a shutdown that hangs return after all, so that a test can end."""


class Death(StrEnum):
    """No request that is under way ever gets another response; what else happens differs.

    STORED: the error waits for whoever touches the API next, and is raised there. RAISED: as STORED, but one more
    response reaches every running request, so that the error is raised in an iteration. SILENT: nothing happens at all.
    """

    STORED = "stored"
    RAISED = "raised"
    SILENT = "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """One field for each variable: see the module's table."""

    step_ms: float = 1.0
    load_s: float = 0.0
    load_error: str = ""
    end_odds: int = 400
    end_in_tokens: int = 1
    drawn_in_logprobs: int = 1
    cancel_steps: int = 2
    error_token: int = -1
    error_after: int = 0
    lost_token: int = -1
    lost_after: int = 0
    death_token: int = -1
    death_steps: int = -1
    death: Death = Death.STORED
    shutdown: str = "ends"
    stats_ms: float = 200.0
    work_file: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Faults":
        """Raises ValueError for a variable or value that means nothing."""
        defaults = {PREFIX + field.name.upper(): (field.name, field.default) for field in fields(cls)}
        given = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
        if unknown := sorted(given.keys() - defaults.keys()):
            raise ValueError(f"unknown variables: {', '.join(unknown)}")
        values: dict[str, Any] = {}
        for name, value in given.items():
            field_name, default = defaults[name]
            values[field_name] = type(default)(value)  # type: ignore[misc]
        return cls(**values)

    def __post_init__(self) -> None:
        if self.shutdown not in ("ends", "hangs"):
            raise ValueError(f"{PREFIX}SHUTDOWN: {self.shutdown!r} is neither 'ends' nor 'hangs'")
