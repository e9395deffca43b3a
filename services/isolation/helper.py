"""A helper process: does one job after the other, each within its bounds, until its socket closes."""

import socket
import traceback
from collections.abc import Callable

from services.core.errors import Failure
from services.isolation import limits
from services.isolation.bounds import Bounds
from services.isolation.frames import Frame, Kind, packed, receive, send

Work = Callable[[bytes], bytes]
"""Does a job: request in, answer out. Raises Failure to refuse it."""


def serve(sock: socket.socket, work: Work, bounds: Bounds) -> None:
    """Do the jobs that come through the socket. Returns when it is closed, and after a job that used up its memory."""
    while (job := receive(sock)) is not None:
        with limits.bounded(bounds.job_cpu_s_max, bounds.job_bytes_max):
            answer = outcome(work, job.payload)
        send(sock, answer)
        if answer.kind is Kind.NO_MEMORY:
            return


def outcome(work: Work, job: bytes) -> Frame:
    """Do a job. Whatever it raises is an answer."""
    try:
        return Frame(Kind.ANSWER, work(job))
    except Failure as failure:
        return Frame(Kind.REFUSAL, packed(failure))
    except MemoryError:
        return Frame(Kind.NO_MEMORY)
    except BaseException:  # A panic in Rust does not derive from Exception.
        return Frame(Kind.BUG, traceback.format_exc().encode(errors="replace"))
