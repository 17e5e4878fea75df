"""A rank's memory (heap, host copies, weights versions) and its connection to the state manager.

`rank` uses this package. The agent's own client of the state manager shares `link`.
"""
