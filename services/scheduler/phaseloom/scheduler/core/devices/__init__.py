"""Devices and their slots, claims on them, host memory, durations, round-robin positions.

Called by `wpgs` and `dispatch`.
"""
