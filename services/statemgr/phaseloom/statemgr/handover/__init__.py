"""Handover: how a new state manager takes over the memory of a killed one."""
