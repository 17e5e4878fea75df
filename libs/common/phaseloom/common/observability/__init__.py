"""Traces, metrics and logs, and folds of the decision log for observers, which decide nothing."""
