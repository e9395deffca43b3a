"""EtcdClient moves on from members that fail, authenticates, and never skips events of a watch."""

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
from services.runtime.loop import run_on_loop
from tests.registry.support import (
    Etcd,
    compact,
    free_port,
    ids,
    put,
    running,
    until,
    until_stored,
)
from tests.support.clock import WAIT_S

pytestmark = pytest.mark.etcd


def test_watch_from_a_compacted_revision_ends_without_events(etcd: Etcd) -> None:
    async def scenario() -> None:
        store, client = EtcdStore(etcd.config), EtcdClient(etcd.config)
        async with running(store):
            await put(store, "w1")
            await put(store, "w2")
            await until(lambda: ids(store) == ["w1", "w2"])
            await compact(etcd, store.cache.revision)

            events: list[int] = []
            async with asyncio.timeout(WAIT_S):
                await client.call(
                    lambda member: member.watch(PREFIX, END, 1, lambda response: events.append(len(response.events)))
                )

            assert sum(events) == 0
        await client.close()

    run_on_loop(scenario())


def test_call_is_retried_on_the_next_member_if_an_endpoint_is_down(etcd: Etcd) -> None:
    async def scenario() -> None:
        config = EtcdConfig(endpoints=(f"127.0.0.1:{free_port()}", etcd.endpoint))
        store = EtcdStore(config)
        async with running(store):
            await put(store, "w1")
            await until(lambda: ids(store) == ["w1"])

    run_on_loop(scenario())


def test_call_is_retried_on_the_next_member_after_the_call_timeout(etcd: Etcd, tmp_path: Path) -> None:
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


async def enable_auth(etcd: Etcd) -> None:
    async with Etcd3Client([etcd.endpoint]) as client:
        auth = client.auth
        assert auth is not None
        await auth.user_add("root", "root-secret", timeout=WAIT_S)
        await auth.user_grant_role("root", "root", timeout=WAIT_S)
        await auth.user_add("registry", "secret", timeout=WAIT_S)
        await auth.role_add("registry", timeout=WAIT_S)
        await auth.role_grant_permission("registry", PREFIX, END, perm_type=PermissionType.READWRITE, timeout=WAIT_S)
        await auth.user_grant_role("registry", "registry", timeout=WAIT_S)
        await auth.auth_enable(timeout=WAIT_S)


def test_client_authenticates_again_after_a_restart_invalidated_its_token(etcd: Etcd) -> None:
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
def test_wrong_password_makes_the_store_unavailable(etcd: Etcd, given: dict[str, str]) -> None:
    async def scenario() -> None:
        await enable_auth(etcd)
        store = EtcdStore(replace(etcd.config, **given))  # type: ignore[arg-type]

        with pytest.raises(Failure) as failure:
            await store.drain("w1")

        assert failure.value.reason is Reason.STORE_AWAY
        assert "wrong" not in failure.value.detail

    run_on_loop(scenario())


def test_client_connects_by_tls_with_a_client_certificate(tmp_path: Path) -> None:
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
    """Create a CA and a certificate for 127.0.0.1, which server and client both use."""
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
