"""A rank process: runs one backend on one device; rank 0 leads, the other ranks follow.

`wire` is what ranks and their agent say to one another.
"""
