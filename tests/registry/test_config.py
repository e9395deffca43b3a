"""Configurations of a registry can be logged: they show no secrets."""

from services.registry.config import EtcdConfig, RegistryConfig


def test_configuration_does_not_show_the_password_and_the_keys() -> None:
    etcd = EtcdConfig(
        endpoints=("127.0.0.1:2379",), password="sesame", ca=b"the ca", client_cert=b"the cert", client_key=b"the key"
    )

    shown = repr(RegistryConfig(etcd=etcd))

    assert "127.0.0.1:2379" in shown
    assert not [secret for secret in ("sesame", "the ca", "the cert", "the key") if secret in shown]
