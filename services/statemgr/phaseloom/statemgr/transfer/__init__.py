"""The engine that moves weights versions, tensor slices and state files between nodes.

The packages `versions` and `seals` decide what to fetch and what to serve. The engine does not know
what the bytes mean.
"""
