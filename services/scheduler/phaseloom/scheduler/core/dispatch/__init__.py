"""The next operations of a device: readiness, choice, permits, speculative switch-in.

Called by the core's door at the end of each step; `explain` tells people.
"""
