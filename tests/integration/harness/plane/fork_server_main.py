"""Starts processes of the plane in a tenth of the usual time: forks them from a process that has imported everything.

Each child is a full process with its own interpreter state, event loop, sockets and signals. The server reads one JSON
object per line and answers each with a line: `{"start": [arguments of unbroken], "log": file}` with the pid, `{"poll":
pid}` with the exit status (minus the signal's number) or null. A start may also have an `environment` with variables to
add. At the end of its input the server kills all children.
"""

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import services.frontend.api.build
import services.frontend.server
import services.registry.etcd_store
import services.registry.server
import services.worker.engines.mocker
import services.worker.server  # noqa: F401 (covers all imports of the package)
from services.cli import main

EXIT_BUG = 70


def serve() -> None:
    """Handle orders until the input ends."""
    children: set[int] = set()
    gc.freeze()  # Keeps the imported objects in shared pages, because no collection writes to them.
    for line in sys.stdin:
        order = json.loads(line)
        answer = _poll(order["poll"], children) if "poll" in order else _start(order, children)
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _start(order: dict[str, Any], children: set[int]) -> int:
    pid = os.fork()
    if pid == 0:
        _become(order["start"], Path(order["log"]), order.get("environment", {}))
    children.add(pid)
    return pid


def _poll(pid: int, children: set[int]) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _become(arguments: list[str], log: Path, environment: dict[str, str]) -> NoReturn:
    """Run `unbroken` with these arguments in this child, and exit without the parent's clean-up."""
    status: Any = EXIT_BUG
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        # The parent's objects may take a pipe for a file, in which they can seek.
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        sys.argv[1:] = arguments
        os.environ.update(environment)
        if "PYTHONPATH" in environment:  # The interpreter has already read it.
            sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        main()
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    serve()
