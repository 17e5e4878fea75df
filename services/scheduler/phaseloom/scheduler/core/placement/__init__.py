"""Placement of jobs: the nodes and devices of each job, repacking, and evacuation of nodes.

Called by the core's entry point and by `jobs`.
"""
