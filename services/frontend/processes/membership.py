"""Makes a frontend process a member of a process group: it serves its own control and uses that of the group.

`member` is a path without a suffix, `FOLDER/NAME`. The folder belongs to the supervisor. The name stays the same when
the process is restarted.
"""

import os
from contextlib import AsyncExitStack
from pathlib import Path

from services.core.errors import Failure
from services.frontend.control import FrontendControl, LocalControl
from services.frontend.processes.ipc import (
    SUPERVISOR_ANSWER_S_MAX,
    SUPERVISOR_SOCKET,
    JoinResponse,
    RemoteControl,
    control_app,
    serve_control,
)
from services.runtime.process import StartupError


def group_control(member: Path) -> FrontendControl:
    """The control of the whole process group, through its supervisor."""
    return _supervisor(member)


async def join_group(servers: AsyncExitStack, member: Path, process: LocalControl) -> JoinResponse:
    """Serve the control of this process until `servers` close, and join the group. Raises StartupError.

    The socket's name contains the pid, so that a restarted process is not mistaken for the one before it.
    """
    path = member.with_name(f"{member.name}.{os.getpid()}.sock")
    try:
        await servers.enter_async_context(serve_control(control_app(process), path))
        return await _supervisor(member).join(member.name, path)
    except (OSError, Failure) as error:
        raise StartupError(f"cannot join the other processes of this frontend in {member.parent}: {error}") from error


def _supervisor(member: Path) -> RemoteControl:
    return RemoteControl(member.with_name(SUPERVISOR_SOCKET), SUPERVISOR_ANSWER_S_MAX)
