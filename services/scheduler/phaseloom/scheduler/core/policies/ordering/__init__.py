"""Ordering policies for production: which of a device's ready operations runs next."""
