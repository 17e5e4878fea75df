"""What is on a device and who has claimed it, host memory, durations, turns of the round robin.

Called by `wpgs` and `dispatch`.
"""
