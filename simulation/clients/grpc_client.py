"""A client of the gRPC API."""

import asyncio
from collections.abc import Mapping

from services.stubs import inference_pb2
from simulation.clients.client import HUNG, PATIENCE_S, SLOW_S, Client
from simulation.grpc.client_rpc import WINDOW_BYTES, ClientRpc, reason_in
from simulation.plane import FRONTEND_PORT

SMALL_WINDOW_BYTES = 600
_FINISHES = {1: "stop", 2: "length"}


class GrpcClient(Client):
    """Streams with Generate and Resume, on either port."""

    async def _attempt(self, frontend: int, *, resumes: bool) -> None:
        if resumes:
            asked = inference_pb2.ResumeRequest(generation_id=self.id, cursor=self.answer.cursor)
            method, metadata, message = "Resume", self._key, asked.SerializeToString()
        else:
            method, metadata, message = "Generate", self._metadata(), self._request()
        rpc = ClientRpc()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._call(rpc, frontend, method, metadata, message)
                await self._read(rpc)
        except OSError as error:
            self._lose(f"connect: {type(error).__name__}")
        except TimeoutError:
            self._lose(HUNG)
        finally:
            rpc.abort()

    def _request(self) -> bytes:
        plan = self._plan
        request = inference_pb2.GenerateRequest(
            model="mocker",
            text=plan.prompts[0],
            request_id=self.id,
            n=plan.n,
            sampling=inference_pb2.Sampling(temperature=plan.temperature, seed=plan.seed),
            stop=inference_pb2.Stop(strings=plan.stop, max_tokens=plan.max_tokens),
            logprobs=plan.logprobs,
            generated_token_ids=self.answer.choices[0].token_ids if self._goes_on else (),
        )
        return request.SerializeToString()

    async def _call(
        self, rpc: ClientRpc, frontend: int, method: str, metadata: Mapping[str, str], message: bytes
    ) -> None:
        port = FRONTEND_PORT + 2 * frontend + self._plan.number % 2
        await rpc.open("127.0.0.1", port)
        window = SMALL_WINDOW_BYTES if self._plan.reader == "slow" else WINDOW_BYTES
        rpc.begin(f"/unbroken.v1.Inference/{method}", metadata, window)
        rpc.send(message, is_last=True)

    async def _cancel(self) -> None:
        rpc, asked = ClientRpc(), inference_pb2.CancelRequest(request_id=self.id)
        try:
            await self._call(rpc, self._any_frontend(), "Cancel", self._key, asked.SerializeToString())
            await rpc.next()
        except OSError:
            return  # The frontend is away: the request is not cancelled.
        finally:
            rpc.abort()

    async def _read(self, rpc: ClientRpc) -> None:
        while (message := await rpc.next()) is not None:
            self._take(inference_pb2.GenerateResponse.FromString(message))
            if self._acts():
                return
            if self._plan.reader == "slow":
                await asyncio.sleep(SLOW_S)
            rpc.take()
        if rpc.trailers is None:
            self._lose(rpc.lost)
        else:
            self._take_trailers(rpc.trailers)

    def _take(self, response: inference_pb2.GenerateResponse) -> None:
        answer = self.answer
        if answer.is_complete:
            answer.faults.append("a message follows complete_final")
        if response.complete_final:
            answer.is_complete = True
        if response.cursor:
            answer.cursor = response.cursor
        if response.HasField("delta"):
            delta = response.delta
            answer.add(
                delta.choice,
                delta.position if delta.token_ids else None,
                delta.token_ids,
                delta.text,
                _FINISHES.get(delta.finish_reason),
                len(delta.logprobs),
            )
            if delta.HasField("usage"):
                answer.usage = (delta.usage.prompt_tokens, delta.usage.completion_tokens)

    def _metadata(self) -> dict[str, str]:
        deadline_s = self._plan.deadline_s
        return self._wishes | self._key | ({} if deadline_s is None else {"grpc-timeout": f"{deadline_s * 1e3:.0f}m"})

    def _take_trailers(self, trailers: Mapping[str, str]) -> None:
        if trailers["grpc-status"] == "0":
            if not self.answer.is_complete:
                self.answer.faults.append("an OK without complete_final")
            return
        self.answer.is_complete = False
        self.answer.failure, self.answer.detail = reason_in(trailers), trailers.get("grpc-message", "")
