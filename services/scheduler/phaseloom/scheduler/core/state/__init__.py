"""What the scheduler knows: the records of the fold, their transitions, the step being made.

Every other package of the core reads and changes these records; only `step.Step` moves an entity
from one state to another and emits outputs.
"""
