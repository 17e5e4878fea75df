"""The life cycle of a mesh process: start, configuration, failures and stop."""
