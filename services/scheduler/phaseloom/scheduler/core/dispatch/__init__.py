"""Who runs next on a device: what is ready, whose turn it is, permits, and what is opened early.

Called by the core's door at the end of each step; `explain` tells people.
"""
