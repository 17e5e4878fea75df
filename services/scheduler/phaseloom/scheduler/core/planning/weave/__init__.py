"""Co-execution groups: how fast the jobs of a group go round (WEAVE §4.2, §4.3)."""
