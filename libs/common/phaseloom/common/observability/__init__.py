"""Traces, metrics and logs, and folds of the decision log for observers, who decide nothing."""
