"""The files with the certificates by which the state managers of a mesh know one another.

<directory>/ca.pem, ca.key              the authority; its key stays where certificates are made
<directory>/nodes/<node>/ca.pem         the authority's certificate, to verify other nodes by
                        /node.pem       the node's certificate; its common name is the node's name
                        /node.key       the node's key, for its owner only
"""

from __future__ import annotations

from pathlib import Path

CA_FILE = "ca.pem"
CA_KEY_FILE = "ca.key"
CERTIFICATE_FILE = "node.pem"
KEY_FILE = "node.key"


def directory_of(directory: Path, node: str) -> Path:
    """The directory with a node's certificate files, which are all that the node needs."""
    return directory / "nodes" / node
