"""A rank process. It runs one backend on one device. Rank 0 leads, the other ranks follow.

`wire` defines the messages between ranks and their agent.
"""
