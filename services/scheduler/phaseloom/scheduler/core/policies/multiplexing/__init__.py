"""Multiplexing policies: which operations run side by side on a device with several compute
units."""
