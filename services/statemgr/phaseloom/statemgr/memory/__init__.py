"""Host memory: its budget, its extents, and the layouts of what lies there."""
