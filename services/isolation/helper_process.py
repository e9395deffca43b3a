"""A helper, as its parent sees it: a socket that takes a job and gives an answer, or ends."""

import asyncio

from services.isolation import frames
from services.isolation.bounds import Bounds
from services.isolation.frames import ANSWERS, Frame, Kind
from services.isolation.losses import HelperLost, Loss, loss_of
from services.isolation.server_process import Forked, ServerLost, ServerProcess
from services.runtime.supervision.child import describe_exit


class HelperBug(RuntimeError):
    """The work raised something else than Failure. The message is its traceback."""


class HelperProcess:
    """One helper. It does one job at a time; after an exception other than Failure and HelperBug, `end` it."""

    @classmethod
    async def fork(cls, server: ServerProcess, bounds: Bounds) -> "HelperProcess":
        """Fork a helper. Raises ServerLost."""
        forked = await server.fork()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=forked.sock)
        except BaseException:
            forked.sock.close()
            raise
        return cls(server, forked, reader, writer, bounds)

    def __init__(
        self,
        server: ServerProcess,
        forked: Forked,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        bounds: Bounds,
    ) -> None:
        self.server = server
        self.job_count = 0
        self._forked = forked
        self._reader = reader
        self._writer = writer
        self._bounds = bounds

    async def do(self, job: bytes) -> bytes:
        """Do a job. Raises Failure if the work refuses it, HelperLost, or HelperBug."""
        self.job_count += 1
        try:
            async with asyncio.timeout(self._bounds.job_s_max) as scope:
                answer = await self._exchange(Frame(Kind.JOB, job))
        except TimeoutError:
            assert scope.expired(), "nothing else in the block has a timeout"
            raise HelperLost(Loss.FROZEN, f"gave no answer within {self._bounds.job_s_max:g} s") from None
        except (OSError, EOFError):
            raise await self._why() from None
        match answer.kind:
            case Kind.ANSWER:
                return answer.payload
            case Kind.REFUSAL:
                raise frames.unpacked(answer.payload)
            case Kind.NO_MEMORY:
                raise HelperLost(Loss.MEMORY, f"needed more than {self._bounds.job_bytes_max >> 20} MiB of memory")
        raise HelperBug(answer.payload.decode(errors="replace"))

    async def _exchange(self, job: Frame) -> Frame:
        self._writer.write(frames.encode(job))
        await self._writer.drain()
        size, kind = frames.HEAD.unpack(await self._reader.readexactly(frames.HEAD.size))
        if kind not in ANSWERS:
            raise HelperLost(Loss.CRASH, "answered with nonsense")
        if size > self._bounds.answer_bytes_max:
            raise HelperLost(Loss.MEMORY, f"answered with more than {self._bounds.answer_bytes_max >> 20} MiB")
        return Frame(Kind(kind), await self._reader.readexactly(size))

    async def _why(self) -> HelperLost:
        """Why the socket ended in the middle of a job."""
        try:
            returncode = await self.server.wait_exit(self._forked)
        except ServerLost:
            return HelperLost(Loss.KILLED, "ended with its fork server")
        return HelperLost(loss_of(returncode), describe_exit(returncode), self.server.take_report())

    @property
    def is_usable(self) -> bool:
        """Whether it may be given another job."""
        is_open = not self._reader.at_eof() and not self._writer.is_closing() and not self.server.is_lost
        return is_open and self.job_count < self._bounds.helper_jobs_max

    def end(self) -> None:
        """End it, whatever it does."""
        self.server.kill(self._forked)
        self._writer.transport.abort()
