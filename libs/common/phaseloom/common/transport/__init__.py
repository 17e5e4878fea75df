"""The NATS bus, and the sockets within a node: connecting, publishing, calling, leases."""
