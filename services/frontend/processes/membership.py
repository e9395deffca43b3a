"""A frontend process's place among the others: where it answers them, and where it asks them.

`member` is a path without an ending, `FOLDER/NAME`: the folder is the supervisor's, the name is this process's and
that of those that come in its place.
"""

import os
from contextlib import AsyncExitStack
from pathlib import Path

from services.core.errors import Failure
from services.frontend.control import FrontendControl, LocalControl
from services.frontend.processes.ipc import (
    SUPERVISOR_ANSWER_S_MAX,
    SUPERVISOR_SOCKET,
    Remote,
    Welcome,
    answering,
    control_app,
)
from services.runtime.process import StartupError


def whole_of(member: Path) -> FrontendControl:
    """The frontend that this process is a part of."""
    return _supervisor(member)


async def enter(servers: AsyncExitStack, member: Path, process: LocalControl) -> Welcome:
    """Answer for this process until `servers` close, and tell the supervisor. Raises StartupError.

    Each life has a socket of its own, so that nobody takes it for the one before.
    """
    path = member.with_name(f"{member.name}.{os.getpid()}.sock")
    try:
        await servers.enter_async_context(answering(control_app(process), path))
        return await _supervisor(member).join(member.name, path)
    except (OSError, Failure) as error:
        raise StartupError(f"cannot join the other processes of this frontend in {member.parent}: {error}") from error


def _supervisor(member: Path) -> Remote:
    return Remote(member.with_name(SUPERVISOR_SOCKET), SUPERVISOR_ANSWER_S_MAX)
