"""How a helper process can be lost, and which losses are the fault of its job."""

import signal
from enum import StrEnum


class Loss(StrEnum):
    """Why a helper was lost. The label of a metric, so the list is closed.

    CRASH: a signal such as SIGSEGV or SIGABRT, or an exit. CPU: `job_cpu_s_max`. MEMORY: `job_bytes_max`. FROZEN:
    `job_s_max`, most of which it did not run. KILLED: from outside, by an operator, by the kernel when memory runs out,
    or with its fork server.
    """

    CRASH = "crash"
    CPU = "cpu"
    MEMORY = "memory"
    FROZEN = "frozen"
    KILLED = "killed"


BLAMED = frozenset({Loss.CRASH, Loss.CPU, Loss.MEMORY})
"""Losses that a job causes itself. After any other, the same job may succeed."""

_OUT_OF_TIME = (signal.SIGPROF, signal.SIGXCPU)
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def loss_of(returncode: int) -> Loss:
    """How a helper was lost that has ended without an answer. `returncode` is as `subprocess` gives it."""
    if -returncode in _OUT_OF_TIME:
        return Loss.CPU
    return Loss.KILLED if -returncode in _FROM_OUTSIDE else Loss.CRASH


class HelperLost(Exception):
    """A helper was lost with a job. `how`: in words, such as "was killed by SIGSEGV".

    `report`: a line that some helper wrote to standard error. It may be about another client's job: log it only.
    """

    def __init__(self, loss: Loss, how: str, report: str = "") -> None:
        super().__init__(loss, how, report)
        self.loss = loss
        self.how = how
        self.report = report
