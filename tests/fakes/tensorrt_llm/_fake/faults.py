"""Injected faults and timing, read from the environment when an LLM is created.

| variable | default | meaning |
| --- | --- | --- |
| TLLM_FAKE_STEP_MS | 1 | duration of a step |
| TLLM_FAKE_LOAD_S | 0 | how long the constructor blocks |
| TLLM_FAKE_LOAD_ERROR | – | the constructor raises RuntimeError with this text |
| TLLM_FAKE_END_ODDS | 400 | at each token, an answer ends with a probability of 1 in N; 0: never |
| TLLM_FAKE_END_IN_TOKENS | 1 | whether `token_ids` includes the end token; only a GPU can tell what 1.2.1 does |
| TLLM_FAKE_DRAWN_IN_LOGPROBS | 1 | the same question for a drawn token that is not likely, in `logprobs` |
| TLLM_FAKE_CANCEL_STEPS | 2 | steps from an abort until it takes effect |
| TLLM_FAKE_ERROR_TOKEN | – | a prompt with this token fails with RequestError ... |
| TLLM_FAKE_ERROR_AFTER | 0 | ... after this many tokens |
| TLLM_FAKE_LOST_TOKEN | – | a prompt with this token gets no more responses, while others continue ... |
| TLLM_FAKE_LOST_AFTER | 0 | ... after this many tokens |
| TLLM_FAKE_DEATH_TOKEN | – | the engine dies once it has computed a prompt with this token |
| TLLM_FAKE_DEATH_STEPS | – | the engine dies after this many steps |
| TLLM_FAKE_DEATH | stored | how it dies: see Death |
| TLLM_FAKE_SHUTDOWN | ends | "hangs": shutdown waits for RELEASE, which only our tests set |
| TLLM_FAKE_STATS_MS | 200 | interval between samples of statistics |
| TLLM_FAKE_WORK_FILE | – | a file with the number of tokens computed so far: see work.py |

Any other variable with the prefix raises ValueError.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

PREFIX = "TLLM_FAKE_"

RELEASE = threading.Event()
"""Lets a hanging shutdown return, so that a test can end."""


class Death(StrEnum):
    """How the engine dies. In all cases, running requests get no further response.

    STORED: the next call of the API raises the error. RAISED: as STORED, but every running request gets one more
    response, so that an iteration raises the error. SILENT: no error is raised.
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
        """Read the variables. Raises ValueError for an unknown variable or an invalid value."""
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
