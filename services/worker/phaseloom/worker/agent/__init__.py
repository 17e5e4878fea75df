"""The node agent: takes the scheduler's commands, starts and ends ranks, orders the state manager.

Imports no torch. `main` wires it.
"""
