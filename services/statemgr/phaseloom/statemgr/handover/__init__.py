"""Handover: what a killed daemon leaves to the next one, and how that takes it over."""
