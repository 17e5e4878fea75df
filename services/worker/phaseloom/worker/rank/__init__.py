"""A rank process: runs one backend on one device; rank 0 leads, the other ranks follow.

`wire` has the messages between ranks and their agent.
"""
