"""WorkerService: it sends its tokeniser in pieces and reports its present load."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from services.core.errors import Reason
from services.core.model_card import TokenizerRef
from services.rpc.status import failure_of
from services.stubs import worker_pb2
from services.worker.dispatcher import Limits
from services.worker.execute import Execute
from services.worker.service import PIECE_BYTES, WorkerService
from services.worker.session import FrontendSessionConfig
from tests.support.doubles import CARD, Script, call_layer, make_request, run_async
from tests.support.manual_worker import ManualEngine, serving

CARD_OF_GGUF = replace(CARD, tokenizer=TokenizerRef("gguf", "abc"))


def fetch(content: bytes, sha256: str = "abc") -> list[bytes]:
    async def scenario() -> list[bytes]:
        async with serving(Script(), engine=ManualEngine(content=content, card=CARD_OF_GGUF)) as served:
            call = served.stub.FetchTokenizer(worker_pb2.FetchTokenizerRequest(sha256=sha256))
            return [piece.data async for piece in call]

    return run_async(scenario())


@pytest.mark.parametrize(
    ("size", "pieces"),
    [(0, []), (1, [1]), (PIECE_BYTES, [PIECE_BYTES]), (2 * PIECE_BYTES + 1, [PIECE_BYTES, PIECE_BYTES, 1])],
)
def test_tokeniser_is_sent_in_pieces_of_bounded_size(size: int, pieces: list[int]) -> None:
    content = bytes(index % 251 for index in range(size))

    fetched = fetch(content)

    assert [len(piece) for piece in fetched] == pieces
    assert b"".join(fetched) == content


def test_unknown_checksum_is_not_found() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        fetch(b"x", sha256="def")

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert failure_of(caught.value, otherwise=Reason.INTERNAL).reason is Reason.MODEL_NOT_FOUND


def test_load_has_the_present_number_of_running_and_waiting_requests() -> None:
    async def scenario() -> list[Any]:
        engine = ManualEngine()
        execute = Execute(engine, Limits(slots=1, places=2))
        service = WorkerService("w1", engine, execute, execute, FrontendSessionConfig())
        loads = [service.load()]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call_layer(execute, make_request())) for _ in range(3)]
            await asyncio.sleep(0)
            loads.append(service.load())
            for task in tasks:
                task.cancel()
        return [*loads, service.load()]

    loads = run_async(scenario())

    assert [(load.running, load.waiting) for load in loads] == [(0, 0), (1, 2), (0, 0)]
    assert loads[1].engine_steps == 7
    assert list(loads[1].ranks) == [
        worker_pb2.RankLoad(kv_blocks_used=1, kv_blocks_total=9, active_prefill_tokens=3, dp_rank=2)
    ]
    assert [load.HasField("service_time") for load in loads] == [False, False, True], "once a slot has been given back"


def test_welcome_has_the_migration_limit_of_the_worker() -> None:
    async def welcome(**config: Any) -> worker_pb2.ModelCard:
        async with serving(Script(), **config) as served:
            frontend = served.attach()
            await frontend.until(lambda: frontend.messages)
            return frontend.messages[0].welcome.card

    assert not run_async(welcome()).HasField("migration_limit")
    assert run_async(welcome(migration_limit=0)).migration_limit == 0
