"""Jobs from submission to end: their deployments, sessions, draining, cancelling, rolling back.

Called by the core's door.
"""
