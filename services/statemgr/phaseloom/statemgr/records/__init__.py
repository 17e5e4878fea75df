"""Pure records of what the node holds; features import them, and they import no feature."""
