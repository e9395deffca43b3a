"""The limit of open files: raised at start, and divided so that clients never take the descriptors of the process.

| share of the limit | for |
| --- | --- |
| `reserve`: an eighth, from RESERVE_MIN to RESERVE_MAX | health checks, sessions with workers, files, refusals |
| `connections_max`: what is left | clients |
"""

import resource

import structlog

log = structlog.get_logger()

LIMIT_MAX = 1 << 20
"""The limit is not raised further: some programs that a child process may run visit every descriptor up to it."""
RESERVE_MIN = 64
RESERVE_MAX = 1024


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one, and log it. Child processes inherit the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # A sandbox may forbid it.
        log.warning("the limit of open files cannot be raised", limit=soft, why=str(error))
    else:
        log.info("limit of open files raised", limit=wanted, before=soft)


def limit() -> int:
    """The number of descriptors that this process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return LIMIT_MAX if soft == resource.RLIM_INFINITY else soft


def reserve(of: int) -> int:
    """How many descriptors of the limit `of` are kept from clients."""
    return min(max(of // 8, RESERVE_MIN), RESERVE_MAX, of // 4)


def connections_max(of: int) -> int:
    """How many connections clients may have, if nothing else has descriptors."""
    return of - reserve(of)


def is_reserved(descriptor: int) -> bool:
    """Whether a new descriptor is one of the reserve. The system always hands out the lowest that is free."""
    return descriptor >= connections_max(limit())
