"""Places of jobs: nodes and devices of each, repacking, nodes that are to be left.

Called by the core's door and by `jobs`.
"""
