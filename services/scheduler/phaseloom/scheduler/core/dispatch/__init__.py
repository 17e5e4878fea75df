"""The next operations of each device: readiness, choice, permits.

`core.Core.step` calls `dispatch` at the end of each step. `explain` describes its decisions.
"""
