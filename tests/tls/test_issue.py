"""A CA and its certificates: what they are for, who may read their keys, and what a folder must not be."""

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.tls.certificate import CertificateError
from services.tls.issue import authority_in, host_name, issue, uri_name


def test_folder_keeps_its_authority(tmp_path: Path) -> None:
    first, is_new = authority_in(tmp_path)
    again, is_new_again = authority_in(tmp_path)

    assert is_new
    assert not is_new_again
    assert first.certificate == again.certificate


def test_only_the_owner_may_read_a_key(tmp_path: Path) -> None:
    authority_in(tmp_path)

    assert (tmp_path / "ca.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("gone", ["ca.pem", "ca.key"])
def test_half_an_authority_is_refused(tmp_path: Path, gone: str) -> None:
    authority_in(tmp_path)
    (tmp_path / gone).unlink()

    with pytest.raises(CertificateError, match="one is missing"):
        authority_in(tmp_path)


def test_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        authority_in(tmp_path / name)
    (tmp_path / "one" / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())

    with pytest.raises(CertificateError, match="not those of a CA made by `unbroken certs`"):
        authority_in(tmp_path / "one")


@pytest.mark.parametrize("is_client", [True, False])
def test_certificate_has_its_names_and_its_uses(tmp_path: Path, is_client: bool) -> None:
    names = [uri_name("spiffe://d/worker"), host_name("127.0.0.1"), host_name("a.example")]

    certificate, _key = issue(authority_in(tmp_path)[0], "worker", names, days=1, is_client=is_client)

    extensions = certificate.extensions
    assert list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value) == names
    uses = list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert (ExtendedKeyUsageOID.CLIENT_AUTH in uses) == is_client
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_host_that_is_no_name_is_refused() -> None:
    with pytest.raises(CertificateError, match="neither the name of a host nor an address"):
        host_name("größer")
