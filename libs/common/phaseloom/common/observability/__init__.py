"""Traces, metrics and logs, and what can be read off the decision log by those who only look on."""
