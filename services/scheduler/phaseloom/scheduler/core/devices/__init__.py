"""Devices and their slots, claims on them, host memory, durations, turns of the round robin.

Called by `wpgs` and `dispatch`.
"""
