"""The scheduler's state: its records, their transitions, and the step in progress.

All other packages of the core read these records. Each field is written by one module only: either
by the record's own methods or by the module that is responsible for the field. Only `step.Step`
moves an entity from one state to another and emits outputs.
"""
