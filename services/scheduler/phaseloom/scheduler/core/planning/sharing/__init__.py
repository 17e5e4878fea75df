"""Building blocks of PlexRL's policies (§6.3): candidate nodes, choice among groups,
reservations."""
