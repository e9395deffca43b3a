"""Makes a certificate authority and certificates, for trying TLS out and for small set-ups.

`cryptography` does what is hard. It is partly written in Rust, so it belongs to an extra, and processes that serve
never import it.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.runtime.files.replace import replace_file
from services.tls.certificate import CertificateError, read_pem

CA = "ca"
CA_DAYS = 3650
EARLY = timedelta(minutes=5)
"""How long before now certificates become valid: clocks differ."""
_USES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
_USES_OF_CA = ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def authority_in(folder: Path, now: datetime | None = None) -> tuple[Authority, bool]:
    """The authority of a folder, which is made if there is none. Returns whether it is new. Raises CertificateError."""
    cert, key = folder / f"{CA}.pem", folder / f"{CA}.key"
    if cert.exists() != key.exists():
        raise CertificateError(f"of {cert} and {key} one is missing: put it back, or remove the other for a new CA")
    if cert.exists():
        return _read_authority(cert, key), False
    made = _new_authority(now or datetime.now(UTC))
    write_pair(folder, CA, made.certificate, made.key)
    return made, True


def issue(
    authority: Authority,
    name: str,
    names: Iterable[x509.GeneralName],
    *,
    days: float,
    is_client: bool,
    now: datetime | None = None,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A new certificate for servers, and with `is_client` for clients too. `names`: the subject's alternative names."""
    begin = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if is_client else [])]
    builder = _builder(name, authority.certificate.subject, key, authority.key, begin, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage("digital_signature"), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority.key, hashes.SHA256()), key


def host_name(host: str) -> x509.GeneralName:
    """The name of a host, or its address. Raises CertificateError."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise CertificateError(f"{host[:64]!r} is neither the name of a host nor an address") from error


def uri_name(uri: str) -> x509.GeneralName:
    """A URI as a name."""
    return x509.UniformResourceIdentifier(uri)


def write_pair(folder: Path, name: str, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Write `NAME.pem` and `NAME.key`, each at once. Only the owner may read the key. Raises CertificateError."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write(folder / f"{name}.key", private, 0o600)
    _write(folder / f"{name}.pem", cert.public_bytes(serialization.Encoding.PEM), 0o644)


def _write(file: Path, content: bytes, mode: int) -> None:
    try:
        replace_file(file, content, mode=mode)
    except OSError as error:
        raise CertificateError(f"{file} cannot be written: {error.strerror}") from error


def _read_authority(cert: Path, key: Path) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate(read_pem(cert))
        private = serialization.load_pem_private_key(read_pem(key), password=None)
    except (ValueError, TypeError) as error:  # TypeError: it is encrypted.
        raise CertificateError(f"{cert} and {key} are not those of a CA made by `unbroken certs`") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != certificate.public_key():
        raise CertificateError(f"{cert} and {key} are not those of a CA made by `unbroken certs`")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        raise CertificateError(f"the CA {cert} has expired: remove {cert} and {key} for a new one")
    return Authority(certificate, private)


def _new_authority(now: datetime) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Unbroken CA")])
    builder = _builder("Unbroken CA", name, key, key, now, CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def _builder(
    subject: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    now: datetime,
    days: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def _usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in (*_USES, *_USES_OF_CA)})
