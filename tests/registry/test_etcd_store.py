"""EtcdStore: registries over one etcd agree, and whatever becomes of etcd, the view is never made up."""

import asyncio
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from etcd3aio import Etcd3Client, PermissionType

from services.core.errors import Failure, Reason
from services.registry.config import EtcdConfig
from services.registry.etcd_client import EtcdClient
from services.registry.etcd_store import END, PREFIX, EtcdStore
from services.registry.registration import Registration
from services.registry.store import Store
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import INSTANCE_STATE_DRAINING, RegisterResponse
from tests.registry.support import WAIT_S, Etcd, Proxy, free_port, instance, running, until

pytestmark = pytest.mark.etcd


async def ignore(_: RegisterResponse) -> None:
    """The client of a registration whose answers are not looked at."""


async def put(store: Store, instance_id: str, lease_s: int = 300) -> None:
    await store.put(instance(instance_id), await store.grant(lease_s), takes_over=True)


def ids(store: Store) -> list[str]:
    return [record.instance_id for record in store.cache.instances()]


async def compact(etcd: Etcd, revision: int) -> None:
    async with Etcd3Client([etcd.endpoint]) as client:
        assert client.kv is not None
        await client.kv.compact(revision, physical=True, timeout=5)


def test_two_registries_over_one_etcd_agree(etcd: Etcd) -> None:
    async def scenario() -> None:
        one, two = EtcdStore(etcd.config), EtcdStore(etcd.config)
        async with running(one, two):
            await put(one, "w1")
            await put(two, "w2")
            await until(lambda: ids(one) == ids(two) == ["w1", "w2"])

            assert one.cache.epoch == two.cache.epoch
            assert one.cache.revision == two.cache.revision

    run_on_loop(scenario())


def test_an_etcd_that_is_down_at_the_start_is_waited_for(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)

    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(store.run())
            with pytest.raises(Failure) as failure:
                await store.grant(10)
            assert failure.value.reason is Reason.STORE_AWAY
            assert not store.cache.is_known

            etcd.start()

            await until(lambda: store.cache.is_known)
            following.cancel()

    try:
        run_on_loop(scenario())
    finally:
        etcd.kill()


def test_the_view_outlives_a_killed_etcd_and_goes_on_after_its_restart(etcd: Etcd) -> None:
    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with running(store):
            await put(store, "w1")
            await until(lambda: ids(store) == ["w1"])
            epoch = store.cache.epoch

            etcd.kill()
            with pytest.raises(Failure):
                await store.drain("w1")
            assert ids(store) == ["w1"]
            etcd.start()

            await until_stored(store, "w2")
            await until(lambda: ids(store) == ["w1", "w2"])
            assert store.cache.epoch == epoch

    run_on_loop(scenario())


async def until_stored(store: Store, instance_id: str) -> None:
    """Put it as soon as the store can be reached."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await put(store, instance_id)
            except Failure:
                await asyncio.sleep(0.02)


def test_an_etcd_that_lost_its_data_is_a_new_epoch_and_living_registrations_come_back(etcd: Etcd) -> None:
    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with running(store), asyncio.TaskGroup() as group:
            for number in range(5):
                await put(store, f"dead{number}")
            living = group.create_task(Registration(store, instance("living"), 1, ignore).run())
            await until(lambda: len(ids(store)) == 6)
            epoch, revision = store.cache.epoch, store.cache.revision

            etcd.kill()
            etcd.wipe()
            etcd.start()

            await until(lambda: ids(store) == ["living"])
            news = store.cache.since(revision, epoch)
            assert news is not None
            assert news.snapshot
            assert store.cache.revision < revision
            living.cancel()

    run_on_loop(scenario())


def test_an_etcd_restored_from_a_backup_is_a_new_epoch(etcd: Etcd, tmp_path: Path) -> None:
    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with running(store):
            await put(store, "before")
            await until(lambda: ids(store) == ["before"])
            epoch = store.cache.epoch
            etcd.kill()
            shutil.copytree(etcd.data, tmp_path / "backup")
            etcd.start()
            await until_stored(store, "after")
            await until(lambda: ids(store) == ["after", "before"])

            etcd.kill()
            etcd.wipe()
            shutil.copytree(tmp_path / "backup", etcd.data)
            etcd.start()

            await until(lambda: ids(store) == ["before"])
            assert store.cache.epoch != epoch

    run_on_loop(scenario())


def test_a_registration_gets_through_an_outage_longer_than_its_lease(etcd: Etcd) -> None:
    async def scenario() -> None:
        proxy = Proxy(etcd.endpoint)
        near, far = EtcdStore(EtcdConfig(endpoints=(proxy.endpoint,))), EtcdStore(etcd.config)
        async with proxy.serving(), running(near, far), asyncio.TaskGroup() as group:
            keeping = group.create_task(Registration(near, instance(), 1, ignore).run())
            await until(lambda: ids(near) == ids(far) == ["w1"])

            proxy.cut()
            await until(lambda: ids(far) == [])
            assert ids(near) == ["w1"]
            proxy.mend()

            await until(lambda: ids(far) == ids(near) == ["w1"])
            keeping.cancel()

    run_on_loop(scenario())


def test_a_registration_that_comes_back_late_does_not_push_out_the_one_that_followed(etcd: Etcd) -> None:
    async def scenario() -> None:
        proxy = Proxy(etcd.endpoint)
        near, far = EtcdStore(EtcdConfig(endpoints=(proxy.endpoint,))), EtcdStore(etcd.config)
        async with proxy.serving(), running(near, far), asyncio.TaskGroup() as group:
            ended = group.create_task(reason_of_end(Registration(near, instance(), 1, ignore)))
            await until(lambda: ids(far) == ["w1"])

            proxy.cut()
            await until(lambda: ids(far) == [])
            await far.put(instance(model="follower"), await far.grant(300), takes_over=True)
            proxy.mend()

            async with asyncio.timeout(WAIT_S):
                assert await ended is Reason.TAKEN_OVER
            await until(lambda: near.cache.instances() == [instance(model="follower")] == far.cache.instances())

    run_on_loop(scenario())


async def reason_of_end(registration: Registration) -> Reason:
    with pytest.raises(Failure) as failure:
        await registration.run()
    return failure.value.reason


def test_changes_that_were_compacted_while_away_are_seen_all_the_same(etcd: Etcd) -> None:
    async def scenario() -> None:
        proxy = Proxy(etcd.endpoint)
        near, far = EtcdStore(EtcdConfig(endpoints=(proxy.endpoint,))), EtcdStore(etcd.config)
        async with proxy.serving(), running(near, far):
            lease = await far.grant(300)
            await far.put(instance("goes"), lease, takes_over=True)
            await put(far, "stays")
            await until(lambda: ids(near) == ["goes", "stays"])
            seen, epoch = near.cache.revision, near.cache.epoch

            proxy.cut()
            await far.revoke(lease)
            await put(far, "comes")
            await until(lambda: ids(far) == ["comes", "stays"])
            await compact(etcd, far.cache.revision)
            proxy.mend()

            await until(lambda: ids(near) == ["comes", "stays"])
            news = near.cache.since(seen, epoch)
            assert news is not None
            assert (news.snapshot, list(news.put), list(news.deleted)) == (False, [instance("comes")], ["goes"])

    run_on_loop(scenario())


def test_a_watch_from_a_compacted_revision_ends_instead_of_passing_over_it(etcd: Etcd) -> None:
    async def scenario() -> None:
        store, client = EtcdStore(etcd.config), EtcdClient(etcd.config)
        async with running(store):
            await put(store, "w1")
            await put(store, "w2")
            await until(lambda: ids(store) == ["w1", "w2"])
            await compact(etcd, store.cache.revision)

            events: list[int] = []
            async with asyncio.timeout(5):
                await client.call(
                    lambda member: member.watch(PREFIX, END, 1, lambda response: events.append(len(response.events)))
                )

            assert sum(events) == 0
        await client.close()

    run_on_loop(scenario())


def test_a_foreign_value_under_the_prefix_is_left_out(etcd: Etcd) -> None:
    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with running(store), Etcd3Client([etcd.endpoint]) as client:
            await put(store, "w1")
            assert client.kv is not None
            await client.kv.put("/unbroken/v1/instances/junk", b"\xff\xff\xff", timeout=5)
            await client.kv.put("/unbroken/v1/other", b"?", timeout=5)
            await put(store, "w2")

            await until(lambda: ids(store) == ["w1", "w2"])

    run_on_loop(scenario())


def test_a_dead_endpoint_costs_nothing_but_the_next_one(etcd: Etcd) -> None:
    async def scenario() -> None:
        config = EtcdConfig(endpoints=(f"127.0.0.1:{free_port()}", etcd.endpoint))
        store = EtcdStore(config)
        async with running(store):
            await put(store, "w1")
            await until(lambda: ids(store) == ["w1"])

    run_on_loop(scenario())


def test_a_hung_endpoint_is_left_after_the_call_timeout(etcd: Etcd, tmp_path: Path) -> None:
    (tmp_path / "hung").mkdir()
    hung = Etcd(tmp_path / "hung")
    hung.start()

    async def scenario() -> None:
        async with running(EtcdStore(hung.config)):
            hung.freeze()
        store = EtcdStore(EtcdConfig(endpoints=(hung.endpoint, etcd.endpoint), call_timeout_s=0.3))
        async with running(store):
            await until_stored(store, "w1")
            await until(lambda: ids(store) == ["w1"])

    try:
        run_on_loop(scenario())
    finally:
        hung.kill()


def test_concurrent_writes_of_one_record_all_take_effect(etcd: Etcd) -> None:
    async def scenario() -> None:
        stores = [EtcdStore(etcd.config) for _ in range(2)]
        async with running(*stores):
            lease = await stores[0].grant(300)
            await stores[0].put(instance(), lease, takes_over=True)

            async with asyncio.TaskGroup() as group:
                group.create_task(stores[0].put(instance(model="new"), lease, takes_over=False))
                group.create_task(stores[1].drain("w1"))

            both = instance(model="new", state=INSTANCE_STATE_DRAINING)
            await until(lambda: stores[0].cache.instances() == stores[1].cache.instances() == [both])

    run_on_loop(scenario())


async def enable_auth(etcd: Etcd) -> None:
    async with Etcd3Client([etcd.endpoint]) as client:
        auth = client.auth
        assert auth is not None
        await auth.user_add("root", "root-secret", timeout=5)
        await auth.user_grant_role("root", "root", timeout=5)
        await auth.user_add("registry", "secret", timeout=5)
        await auth.role_add("registry", timeout=5)
        await auth.role_grant_permission("registry", PREFIX, END, perm_type=PermissionType.READWRITE, timeout=5)
        await auth.user_grant_role("registry", "registry", timeout=5)
        await auth.auth_enable(timeout=5)


def test_user_and_password_are_used_and_a_token_that_a_restart_made_worthless_is_replaced(etcd: Etcd) -> None:
    async def scenario() -> None:
        await enable_auth(etcd)
        store = EtcdStore(replace(etcd.config, username="registry", password="secret"))
        async with running(store):
            await put(store, "w1")
            await until(lambda: ids(store) == ["w1"])

            etcd.kill()
            etcd.start()

            await until_stored(store, "w2")
            await until(lambda: ids(store) == ["w1", "w2"])

    run_on_loop(scenario())


@pytest.mark.parametrize("given", [{}, {"username": "registry", "password": "wrong"}])
def test_without_the_right_password_the_store_is_away(etcd: Etcd, given: dict[str, str]) -> None:
    async def scenario() -> None:
        await enable_auth(etcd)
        store = EtcdStore(replace(etcd.config, **given))  # type: ignore[arg-type]

        with pytest.raises(Failure) as failure:
            await store.drain("w1")

        assert failure.value.reason is Reason.STORE_AWAY
        assert "wrong" not in failure.value.detail

    run_on_loop(scenario())


def test_tls_with_a_client_certificate(tmp_path: Path) -> None:
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    make_certificates(tmp_path)
    options = ("--cert-file", str(cert), "--key-file", str(key), "--client-cert-auth", "--trusted-ca-file", str(ca))
    etcd = Etcd(tmp_path, *options, scheme="https")
    etcd.start()

    async def scenario() -> None:
        trusting = replace(etcd.config, is_tls=True, ca=ca.read_bytes())
        known = EtcdStore(replace(trusting, client_cert=cert.read_bytes(), client_key=key.read_bytes()))
        async with running(known):
            await put(known, "w1")
            await until(lambda: ids(known) == ["w1"])
            for config in (trusting, etcd.config):
                with pytest.raises(Failure):
                    await EtcdStore(config).grant(10)

    try:
        run_on_loop(scenario())
    finally:
        etcd.kill()


def make_certificates(folder: Path) -> None:
    """A CA, and one certificate from it for both ends of 127.0.0.1."""
    program = shutil.which("openssl")
    assert program is not None, "this test needs openssl: install it (Debian: apt-get install openssl)"
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    new_key: Sequence[str] = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-batch")
    sign: Sequence[str] = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
    for arguments in (
        ("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test ca", "-days", "2"),
        ("req", *new_key, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=test"),
        ("x509", "-req", "-in", "request.pem", *sign, "-extfile", "names", "-out", "cert.pem", "-days", "2"),
    ):
        subprocess.run([program, *arguments], cwd=folder, check=True, capture_output=True)
