"""Transport: the NATS bus and the sockets within a node (connecting, publishing, calls, leases)."""
