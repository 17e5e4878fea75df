"""`phaseloom certs` creates a certificate authority for a mesh and a certificate for each node.

State managers authenticate to each other with these certificates. `phaseloom up` does not need this
command: it creates new certificates for each run.

Keys are P-256, signatures ECDSA with SHA-256. To rotate the certificate of one node, run the
command again for that node. To rotate all of them, create them with a new authority in another
directory.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import check_name
from phaseloom.common.process.files import replace_file
from phaseloom.common.transport.certificates import (
    CA_FILE,
    CA_KEY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    directory_of,
)

_VALID = datetime.timedelta(days=3650)
_CLOCK_TOLERANCE = datetime.timedelta(days=1)
"""Certificates are valid from this long before their creation, because the clocks of nodes
differ."""


def certs(directory: Path, *nodes: str) -> None:
    """Create certificates for nodes, signed by the authority in the directory.

    If the directory has no authority, create one.

    Parameters
    ----------
    directory
        Directory for the files. nodes/<node> below it holds the files of one node; set
        `statemgr.certificates` of that node to it.
    nodes
        Names of the nodes. A node that already has a certificate gets a new one.
    """
    make_certificates(directory, nodes)
    for node in nodes:
        print(directory_of(directory, node))


def make_certificates(directory: Path, nodes: Sequence[str]) -> None:
    """Write a key and a certificate for each node. Create the authority first if there is none.

    Raises: CallerError: no node is named, a name is invalid, or the authority cannot be read.
    """
    if not nodes:
        raise CallerError(
            "expected at least one node, got none",
            field="nodes",
            remedy="name the nodes that need certificates",
        )
    for node in nodes:
        check_name(node, "nodes")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _authority(directory)
    for node in nodes:
        place = directory_of(directory, node)
        place.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = authority.sign(key, node)
        replace_file(place / CA_FILE, _pem(authority.certificate), 0o644)
        replace_file(place / CERTIFICATE_FILE, _pem(certificate), 0o644)
        replace_file(place / KEY_FILE, _pem_of_key(key), 0o600)


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def sign(self, key: ec.EllipticCurvePrivateKey, node: str) -> x509.Certificate:
        usage = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        return (
            _builder(_name(node), self.certificate.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
            .sign(self.key, hashes.SHA256())
        )


def _authority(directory: Path) -> _Authority:
    """Return the authority in the directory. Create it first if there is none."""
    certificate, key = directory / CA_FILE, directory / CA_KEY_FILE
    if not key.exists():
        authority = _new_authority()
        replace_file(certificate, _pem(authority.certificate), 0o644)
        replace_file(key, _pem_of_key(authority.key), 0o600)
        return authority
    try:
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        return _Authority(x509.load_pem_x509_certificate(certificate.read_bytes()), loaded)
    except (OSError, ValueError, AssertionError) as error:
        raise CallerError(
            f"the certificate authority in {directory} cannot be read: {error}",
            code=Code.FAILED_PRECONDITION,
            field="directory",
            remedy="use another directory and create all certificates again",
        ) from error


def _new_authority() -> _Authority:
    key, name = ec.generate_private_key(ec.SECP256R1()), _name("phaseloom")
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS, critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Authority(certificate, key)


_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(now + _VALID)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
