"""Ordering policies that people run: which of the ready operations of a device runs next."""
