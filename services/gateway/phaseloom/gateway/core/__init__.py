"""The gateway's decisions, without I/O: converts messages of the Tinker API to operations of the
mesh."""
