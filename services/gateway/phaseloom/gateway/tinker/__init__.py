"""The Tinker API, as its SDK speaks it."""
