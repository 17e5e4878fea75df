"""What the gateway decides without I/O: messages of the Tinker API as operations of the mesh."""
