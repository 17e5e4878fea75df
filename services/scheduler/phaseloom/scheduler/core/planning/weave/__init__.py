"""Co-execution groups: how fast the jobs of a group go round, and which of them fit together (WEAVE
§4.2, §4.3)."""
