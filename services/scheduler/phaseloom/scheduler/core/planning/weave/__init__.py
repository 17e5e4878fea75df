"""Co-execution groups: the pace of a group's jobs, and which jobs fit together (WEAVE §4.2,
§4.3)."""
