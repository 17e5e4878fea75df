"""Devices and their slots, claims on them, host memory, duration estimates and round-robin
positions.

Called by `wpgs` and `dispatch`.
"""
