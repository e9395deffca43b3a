"""The bounds of a pool of helper processes."""

from dataclasses import dataclass, field

from services.runtime.backoff import Backoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What helper processes may use.

    helpers_max: helpers at a time. jobs_max: jobs that run or wait, together. wait_s_max: wait for a free helper.
    job_cpu_s_max: processor time of one job, so that a busy machine is not mistaken for endless work.
    job_s_max: time of one job on the clock, for a helper that is frozen.
    stack_bytes_max: stack of a helper: less than the usual limit of 8 MiB, because what is left of that depends on the
    environment, and a text should crash its helper always or never.
    job_bytes_max: memory that one job may add to its helper. answer_bytes_max: the answer to it.
    helper_jobs_max: jobs of one helper, so that what each leaves behind does not add up.
    idle_s_max: after that time without a job, a helper ends.
    fork_s_max: until the fork server has forked a helper, or tells how one ended. It counts as lost after that.
    load_s_max, load_cpu_s_max, load_bytes_max: time, processor time and address space to load what helpers work with.
    start_wait_s_max: how long a job waits for a fork server that is started again.
    backoff: before each such start.
    """

    helpers_max: int = 4
    jobs_max: int = 64
    wait_s_max: float = 30.0
    job_cpu_s_max: float = 10.0
    job_s_max: float = 60.0
    stack_bytes_max: int = 6 << 20
    job_bytes_max: int = 1 << 30
    answer_bytes_max: int = 64 << 20
    helper_jobs_max: int = 1000
    idle_s_max: float = 30.0
    fork_s_max: float = 5.0
    load_s_max: float = 120.0
    load_cpu_s_max: float = 20.0
    load_bytes_max: int = 2 << 30
    start_wait_s_max: float = 15.0
    backoff: Backoff = field(default_factory=lambda: Backoff(base_s=0.1, cap_s=5.0))


END_TIMEOUT_S = 2.0
"""How long a fork server may take to end its helpers and itself. It is killed after that."""
