"""A deployment's queue of operations: filing, waiting, expiry, cycles in `after`, gradients.

Called by the core's door and by what ends or repeats operations: `wpgs`, `jobs`.
"""
