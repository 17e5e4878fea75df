"""The state of the scheduler: the records of the fold, their transitions, the step being made.

Every other package of the core reads these records. Each field of a record is written by one module
only: by the record's own methods, or by the one module whose subject the field is. Only `step.Step`
moves an entity from one state to another and emits outputs.
"""
