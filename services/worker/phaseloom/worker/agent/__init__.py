"""The node agent: carries out the scheduler's commands, runs rank processes, directs the state
manager.

Imports no torch. `main` wires it.
"""
