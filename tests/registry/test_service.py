"""RegistryService keeps the promises of registry.proto, over a real socket."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.core.errors import Failure
from services.registry import registration, service
from services.registry.config import EtcdConfig
from services.registry.etcd_store import EtcdStore
from services.registry.memory_store import MemoryStore
from services.registry.watch_cache import WatchCache
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_SERVING,
    INSTANCE_STATE_UNSPECIFIED,
    Deregister,
    DrainRequest,
    Instance,
    ListRequest,
    RegisterRequest,
    WatchRequest,
    WatchResponse,
)
from tests.registry.support import Etcd, client, free_port, instance, register, running, served
from tests.support.clock import WAIT_S

Scenario = Callable[[Any], Awaitable[None]]


def on_memory(scenario: Scenario) -> None:
    """Run the scenario with a stub of a registry with the embedded store."""

    async def main() -> None:
        async with running(store := MemoryStore()), served(store) as address, client(address) as stub:
            await scenario(stub)

    run_on_loop(asyncio.wait_for(main(), 2 * WAIT_S))


async def registered(stub: Any, record: Instance, lease_s: int = 10) -> Any:
    """Open a Register stream, and wait until the record is confirmed."""
    call = stub.Register()
    await call.write(register(record, lease_s))
    confirmed = await call.read()
    assert confirmed.instance.instance_id == record.instance_id
    return call


async def ids(stub: Any) -> list[str]:
    return [record.instance_id for record in (await stub.List(ListRequest())).instances]


async def until_watched(call: Any, condition: Callable[[WatchResponse], bool]) -> WatchResponse:
    """The first message of the watch for which `condition` is true."""
    async with asyncio.timeout(WAIT_S):
        while True:
            response: WatchResponse = await call.read()
            if condition(response):
                return response


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return str(info.reason)


# Register


def test_first_response_of_register_confirms_the_record() -> None:
    async def scenario(stub: Any) -> None:
        call = stub.Register()
        await call.write(register(instance(), 7))

        confirmed = await call.read()

        assert confirmed.instance == instance()
        assert confirmed.lease.ToSeconds() == 7
        assert confirmed.revision == (await stub.List(ListRequest())).revision

    on_memory(scenario)


def test_record_without_state_and_lease_is_serving_with_a_lease_of_10_s() -> None:
    async def scenario(stub: Any) -> None:
        call = stub.Register()
        await call.write(RegisterRequest(instance=instance(state=INSTANCE_STATE_UNSPECIFIED)))

        confirmed = await call.read()

        assert confirmed.instance.state == INSTANCE_STATE_SERVING
        assert confirmed.lease.ToSeconds() == 10

    on_memory(scenario)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (RegisterRequest(), "instance"),
        (RegisterRequest(deregister=Deregister()), "instance"),
        (register(instance("")), "instance.instance_id"),
        (register(instance("a/b")), "instance.instance_id"),
        (register(instance("x" * 129)), "instance.instance_id"),
        (register(instance(address="")), "instance.address"),
        (register(instance(address="host")), "instance.address"),
        (register(instance(address="host:0")), "instance.address"),
        (register(instance(address="host:65536")), "instance.address"),
        (register(instance(address="http://host:80")), "instance.address"),
        (register(instance(session_address="host")), "instance.session_address"),
        (register(instance(model="")), "instance.model"),
        (register(instance(), 0), "lease"),
        (register(instance(), 301), "lease"),
        (RegisterRequest(instance=instance(), lease=Duration(seconds=1, nanos=1)), "lease"),
    ],
)
def test_incomplete_record_is_refused_with_the_name_of_the_field(request_: RegisterRequest, param: str) -> None:
    async def scenario(stub: Any) -> None:
        call = stub.Register()
        await call.write(request_)

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()

        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(error.value)
        info = error_details_pb2.ErrorInfo()
        assert status is not None
        assert status.details[0].Unpack(info)
        assert info.metadata["param"] == param
        assert await ids(stub) == []

    on_memory(scenario)


@pytest.mark.parametrize("address", ["worker-1.example:50052", "10.0.0.1:1", "[::1]:65535"])
def test_host_names_and_both_kinds_of_ip_addresses_are_accepted(address: str) -> None:
    async def scenario(stub: Any) -> None:
        await registered(stub, instance(address=address))

    on_memory(scenario)


def test_second_record_on_the_stream_replaces_the_first() -> None:
    async def scenario(stub: Any) -> None:
        call = await registered(stub, instance())

        await call.write(register(instance(model="other")))
        confirmed = await call.read()

        assert confirmed.instance.model == "other"
        assert (await stub.List(ListRequest())).instances == [instance(model="other")]

    on_memory(scenario)


def test_invalid_update_ends_the_stream_and_the_record_stays_for_its_lease() -> None:
    async def scenario(stub: Any) -> None:
        call = await registered(stub, instance())

        await call.write(register(instance("another")))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()

        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await ids(stub) == ["w1"]

    on_memory(scenario)


def test_invalid_update_right_after_the_record_ends_the_stream() -> None:
    """A bug: it cancelled the first write midway, gRPC could not end the call, and the client waited forever."""

    async def scenario(stub: Any) -> None:
        call = stub.Register()
        await call.write(register(instance()))
        await call.write(register(instance("another")))

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await until_watched(call, lambda _: False)

        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    on_memory(scenario)


def test_deregister_removes_the_record_and_ends_the_stream_with_ok() -> None:
    async def scenario(stub: Any) -> None:
        call = await registered(stub, instance(), 300)

        await call.write(RegisterRequest(deregister=Deregister()))

        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert await ids(stub) == []

    on_memory(scenario)


@pytest.mark.parametrize("ending", ["cancel", "done_writing"])
def test_record_expires_one_lease_after_its_stream_broke(ending: str) -> None:
    async def scenario(stub: Any) -> None:
        loop = asyncio.get_running_loop()
        watch = stub.Watch(WatchRequest())
        calls = [await registered(stub, instance(name), lease_s) for name, lease_s in (("w1", 1), ("w2", 2))]
        broken_at = loop.time()

        for call in calls:
            call.cancel() if ending == "cancel" else await call.done_writing()

        gone = await until_watched(watch, lambda response: bool(response.deleted))
        assert gone.deleted[0] == "w1", "before twice its lease is over"
        assert loop.time() - broken_at >= 0.95

    on_memory(scenario)


def test_new_stream_takes_the_record_over_and_the_old_stream_is_aborted() -> None:
    async def scenario(stub: Any) -> None:
        before = await registered(stub, instance(), 1)

        await registered(stub, instance(model="new"))

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await before.read()
        assert error.value.code() is grpc.StatusCode.ABORTED
        assert reason_of(error.value) == "TAKEN_OVER"
        await asyncio.sleep(1.2)  # Longer than the first lease: its end must not remove the record.
        assert (await stub.List(ListRequest())).instances == [instance(model="new")]

    on_memory(scenario)


# Watch


def test_watch_sends_a_snapshot_and_then_each_change() -> None:
    async def scenario(stub: Any) -> None:
        call = await registered(stub, instance())

        watch = stub.Watch(WatchRequest())
        first = await watch.read()
        assert first.snapshot
        assert list(first.put) == [instance()]

        await registered(stub, instance("w2"))
        second = await watch.read()
        assert not second.snapshot
        assert list(second.put) == [instance("w2")]
        assert second.epoch == first.epoch
        assert second.revision > first.revision

        await call.write(RegisterRequest(deregister=Deregister()))
        assert list((await watch.read()).deleted) == ["w1"]

    on_memory(scenario)


def test_watch_without_instances_starts_with_an_empty_snapshot() -> None:
    async def scenario(stub: Any) -> None:
        first = await stub.Watch(WatchRequest()).read()

        assert first.snapshot
        assert first.epoch
        assert not first.put

    on_memory(scenario)


def test_watch_resumes_after_the_last_revision() -> None:
    async def scenario(stub: Any) -> None:
        await registered(stub, instance())
        seen = await stub.Watch(WatchRequest()).read()
        await registered(stub, instance("w2"))

        resumed = await stub.Watch(WatchRequest(revision=seen.revision, epoch=seen.epoch)).read()

        assert not resumed.snapshot
        assert list(resumed.put) == [instance("w2")]

    on_memory(scenario)


def test_resumed_watch_without_changes_is_answered_at_once() -> None:
    async def scenario(stub: Any) -> None:
        seen = await stub.Watch(WatchRequest()).read()

        resumed = await stub.Watch(WatchRequest(revision=seen.revision, epoch=seen.epoch)).read()

        assert resumed == WatchResponse(revision=seen.revision, epoch=seen.epoch)

    on_memory(scenario)


def test_watch_with_an_unknown_epoch_starts_with_a_snapshot() -> None:
    async def scenario(stub: Any) -> None:
        await registered(stub, instance())

        first = await stub.Watch(WatchRequest(revision=1, epoch="from another life")).read()

        assert first.snapshot
        assert list(first.put) == [instance()]

    on_memory(scenario)


def test_slow_watcher_gets_the_changes_that_it_missed_in_few_messages() -> None:
    """Flow control stops the stream of a watcher that does not read, while 3,000 changes happen."""

    async def main() -> None:
        store = MemoryStore(WatchCache(history_changes_max=50))
        async with running(store), served(store) as address, client(address) as stub:
            lease = await store.grant(300)
            watch = stub.Watch(WatchRequest())
            await watch.read()
            for number in range(3000):
                await store.put(instance(model=f"{number:0200}"), lease, takes_over=True)
                if number % 10 == 0:
                    await asyncio.sleep(0)

            messages = 1
            while not (last := await watch.read()).put or not last.put[0].model.endswith("2999"):
                messages += 1

        assert last.revision == 3000
        assert messages < 3000

    run_on_loop(asyncio.wait_for(main(), WAIT_S))


def test_stream_of_a_watcher_that_does_not_read_ends_with_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: a frontend that hung kept its stream and its resources in the registry while the connection stood."""
    monkeypatch.setattr(registration, "SEND_TIMEOUT_S", 0.1)
    is_broken_off = asyncio.Event()  # The only sign that the buffers are full.

    async def send(*arguments: Any) -> None:
        try:
            await registration.send_in_time(*arguments)
        except Failure:
            is_broken_off.set()
            raise

    monkeypatch.setattr(service, "send_in_time", send)

    async def main() -> None:
        async with running(store := MemoryStore()), served(store) as address, client(address) as stub:
            lease = await store.grant(300)
            watch = stub.Watch(WatchRequest())
            await watch.read()
            while not is_broken_off.is_set():
                await store.put(instance(model="m" * 20_000), lease, takes_over=True)
                await asyncio.sleep(0)

            with pytest.raises(grpc.aio.AioRpcError) as error:
                await until_watched(watch, lambda _: False)

            assert reason_of(error.value) == "SLOW_CLIENT"

    run_on_loop(asyncio.wait_for(main(), WAIT_S))


# List and Drain


def test_list_is_sorted_by_id() -> None:
    async def scenario(stub: Any) -> None:
        for instance_id in ("b", "a"):
            await registered(stub, instance(instance_id))

        assert await ids(stub) == ["a", "b"]

    on_memory(scenario)


def test_drain_is_sent_to_watchers_and_to_the_instance() -> None:
    async def scenario(stub: Any) -> None:
        call = await registered(stub, instance())
        watch = stub.Watch(WatchRequest())
        await watch.read()

        answer = await stub.Drain(DrainRequest(instance_id="w1"))

        marked = instance(state=INSTANCE_STATE_DRAINING)
        assert answer.instance == marked
        assert list((await watch.read()).put) == [marked]
        assert (await call.read()).instance == marked
        assert (await stub.Drain(DrainRequest(instance_id="w1"))).instance == marked

    on_memory(scenario)


def test_drain_of_an_unknown_instance_is_not_found() -> None:
    async def scenario(stub: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Drain(DrainRequest(instance_id="nobody"))

        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert reason_of(error.value) == "INSTANCE_NOT_FOUND"

    on_memory(scenario)


# On etcd


def on_etcd(etcd: Etcd, scenario: Callable[..., Awaitable[None]]) -> None:
    """Run the scenario with stubs of two registries on one etcd."""

    async def main() -> None:
        stores = [EtcdStore(etcd.config) for _ in range(2)]
        async with running(*stores), AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(served(store)) for store in stores]
            await scenario(*[await stack.enter_async_context(client(address)) for address in addresses])

    run_on_loop(asyncio.wait_for(main(), 2 * WAIT_S))


@pytest.mark.etcd
def test_drain_on_one_registry_reaches_an_instance_on_another(etcd: Etcd) -> None:
    async def scenario(one: Any, two: Any) -> None:
        call = await registered(one, instance())

        await two.Drain(DrainRequest(instance_id="w1"))

        assert (await call.read()).instance.state == INSTANCE_STATE_DRAINING

    on_etcd(etcd, scenario)


@pytest.mark.etcd
def test_new_stream_on_another_registry_takes_the_record_over(etcd: Etcd) -> None:
    async def scenario(one: Any, two: Any) -> None:
        before = await registered(one, instance(), 1)

        await registered(two, instance(model="new"))

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await before.read()
        assert error.value.code() is grpc.StatusCode.ABORTED
        watch = one.Watch(WatchRequest())
        snapshot = await until_watched(watch, lambda response: response.snapshot)
        assert list(snapshot.put) == [instance(model="new")]

    on_etcd(etcd, scenario)


@pytest.mark.etcd
def test_watch_resumes_on_another_registry(etcd: Etcd) -> None:
    async def scenario(one: Any, two: Any) -> None:
        watch = one.Watch(WatchRequest())
        await registered(one, instance())
        seen = await until_watched(watch, lambda response: bool(response.put))
        await registered(two, instance("w2"))

        resumed = await until_watched(
            two.Watch(WatchRequest(revision=seen.revision, epoch=seen.epoch)), lambda response: bool(response.put)
        )

        assert not resumed.snapshot
        assert list(resumed.put) == [instance("w2")]

    on_etcd(etcd, scenario)


@pytest.mark.etcd
def test_during_an_etcd_outage_streams_stay_open_and_new_records_are_confirmed_afterwards(
    etcd: Etcd,
) -> None:
    async def scenario(one: Any, _two: Any) -> None:
        call = await registered(one, instance())
        watch = one.Watch(WatchRequest())
        await until_watched(watch, lambda response: bool(response.put))
        etcd.kill()

        late = one.Register()
        await late.write(register(instance("late")))
        assert await ids(one) == ["w1"]
        assert list((await one.Watch(WatchRequest()).read()).put) == [instance()]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await one.Drain(DrainRequest(instance_id="w1"))
        assert reason_of(error.value) == "STORE_AWAY"
        etcd.start()

        assert (await late.read()).instance == instance("late")
        await until_watched(watch, lambda response: list(response.put) == [instance("late")])
        await call.write(register(instance(model="update")))
        assert (await call.read()).instance.model == "update"

    on_etcd(etcd, scenario)


@pytest.mark.etcd
def test_registry_that_never_reached_etcd_answers_unavailable_instead_of_an_empty_list() -> None:
    async def main() -> None:
        store = EtcdStore(EtcdConfig(endpoints=(f"127.0.0.1:{free_port()}",)))
        async with served(store) as address, client(address) as stub:
            for asked in (stub.List(ListRequest()), stub.Watch(WatchRequest()).read()):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await asked
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
                assert reason_of(error.value) == "STORE_AWAY"

    run_on_loop(asyncio.wait_for(main(), WAIT_S))
