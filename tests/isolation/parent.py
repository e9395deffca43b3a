"""A process with a helper at work. Argument: the file for the pids of the helper and its fork server."""

import asyncio
import sys
from pathlib import Path

from services.isolation.pool import HelperPool
from services.runtime.loop import run_on_loop
from tests.isolation.works import LOADER


def report(pids: str) -> None:
    Path(sys.argv[1]).write_text(f"{pids}\n")


async def main() -> None:
    pool = HelperPool("test", LOADER, b"")
    pids = (await pool.run(b"pid")).decode()
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.run(b"sleep 60"))
        await asyncio.sleep(0.05)
        report(pids)


if __name__ == "__main__":
    run_on_loop(main())
