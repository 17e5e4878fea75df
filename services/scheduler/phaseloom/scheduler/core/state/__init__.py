"""What the scheduler knows: the records of the fold, their transitions, the step being made.

Every other package of the core reads these records and changes them through their methods: the
fields of a deployment's and a job's records are assigned in the record's own module only. Only
`step.Step` moves an entity from one state to another and emits outputs.
"""
