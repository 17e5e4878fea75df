"""The files with the certificates by which the state managers of a mesh know one another.

<directory>/ca.pem, ca.key              the authority; its key stays where certificates are made
<directory>/nodes/<node>/ca.pem         what the node verifies others by
                        /node.pem       its certificate; the common name is the node's
                        /node.key       for its owner only
"""

from __future__ import annotations

from pathlib import Path

CA_FILE = "ca.pem"
CA_KEY_FILE = "ca.key"
CERTIFICATE_FILE = "node.pem"
KEY_FILE = "node.key"


def directory_of(directory: Path, node: str) -> Path:
    """The directory of a node: the files there are all that it needs."""
    return directory / "nodes" / node
