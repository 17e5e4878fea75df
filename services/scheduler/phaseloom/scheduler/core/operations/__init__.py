"""A deployment's queue: operations are enqueued, wait for their dependencies, and end."""
