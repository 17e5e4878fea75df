"""A rank's memory and its side of the state manager: heap, host copies, weights versions, link.

`rank` drives it; the agent's own client of the state manager uses the same link.
"""
