"""Multiplexing policies: what runs beside what on a device of several compute units."""
