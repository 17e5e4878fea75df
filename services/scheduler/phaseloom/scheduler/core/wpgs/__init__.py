"""Worker-process groups: their incarnations, and their moves from nodes to nodes.

Called by the core's door for what agents report, by `placement` and `jobs`.
"""
