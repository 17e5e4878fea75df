"""`phaseloom certs`: keys are private, names are safe, renewal keeps the authority."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from phaseloom.cli.certs import certs, make_certificates
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.transport.certificates import directory_of
from phaseloom.statemgr.transfer.tls import Identity


def _handshake(server: Identity, client: Identity) -> None:
    """In memory. Raises: ssl.SSLError."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.client.wrap_bio(incoming, outgoing)
    there = server.server.wrap_bio(outgoing, incoming, server_side=True)
    for end in (here, there, here, there):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    there.write(b"done")
    assert here.read() == b"done"


def test_each_node_trusts_the_others_and_keys_are_its_own(tmp_path: Path) -> None:
    make_certificates(tmp_path / "mesh", ["a", "b"])
    nodes = [directory_of(tmp_path / "mesh", name) for name in "ab"]
    first, second = (Identity.load(node) for node in nodes)
    _handshake(first, second)
    _handshake(second, first)
    keys = [*(node / "node.key" for node in nodes), tmp_path / "mesh" / "ca.key"]
    assert [oct(key.stat().st_mode & 0o777) for key in keys] == ["0o600"] * 3
    assert oct((tmp_path / "mesh").stat().st_mode & 0o777) == "0o700"
    assert sorted(path.name for path in nodes[0].iterdir()) == ["ca.pem", "node.key", "node.pem"]


def test_renewal_keeps_the_authority_and_another_directory_has_another(tmp_path: Path) -> None:
    for directory in ("mesh", "other"):
        make_certificates(tmp_path / directory, ["a"])
    before = (directory_of(tmp_path / "mesh", "a") / "node.pem").read_bytes()
    old = Identity.load(directory_of(tmp_path / "mesh", "a"))
    make_certificates(tmp_path / "mesh", ["a", "late"])
    assert (directory_of(tmp_path / "mesh", "a") / "node.pem").read_bytes() != before
    _handshake(old, Identity.load(directory_of(tmp_path / "mesh", "late")))
    with pytest.raises(ssl.SSLError):
        _handshake(old, Identity.load(directory_of(tmp_path / "other", "a")))


@pytest.mark.parametrize("nodes", [[], ["../a"], ["a/b"], [""], ["a", ".."]])
def test_bad_names_make_nothing(tmp_path: Path, nodes: list[str]) -> None:
    with pytest.raises(CallerError):
        make_certificates(tmp_path / "mesh", nodes)
    assert not (tmp_path / "mesh").exists()


@pytest.mark.parametrize("name", ["ca.key", "ca.pem"])
def test_an_authority_that_cannot_be_read_is_left_alone(tmp_path: Path, name: str) -> None:
    make_certificates(tmp_path, ["a"])
    (tmp_path / name).write_text("not PEM")
    with pytest.raises(CallerError, match="cannot be read") as caught:
        make_certificates(tmp_path, ["a"])
    assert caught.value.info.code is Code.FAILED_PRECONDITION
    assert (tmp_path / name).read_text() == "not PEM"


def test_command_says_what_each_node_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs(tmp_path, "a", "b")
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "nodes" / "a"),
        str(tmp_path / "nodes" / "b"),
    ]
