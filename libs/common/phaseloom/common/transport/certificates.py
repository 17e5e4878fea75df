"""The certificate files with which the state managers of a mesh authenticate each other.

<directory>/ca.pem, ca.key              the authority; its key stays where certificates are made
<directory>/nodes/<node>/ca.pem         the authority's certificate, to verify other nodes
                        /node.pem       the node's certificate; its common name is the node's name
                        /node.key       the node's key, readable only by its owner
"""

from __future__ import annotations

from pathlib import Path

CA_FILE = "ca.pem"
CA_KEY_FILE = "ca.key"
CERTIFICATE_FILE = "node.pem"
KEY_FILE = "node.key"


def directory_of(directory: Path, node: str) -> Path:
    """Return the directory with all certificate files that a node needs."""
    return directory / "nodes" / node
