"""The decisions of the gateway, without I/O: messages of the Tinker API as operations of the
mesh."""
