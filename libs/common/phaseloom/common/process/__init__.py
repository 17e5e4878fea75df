"""The life of a process of the mesh: its start, its configuration, its failures and its stop."""
