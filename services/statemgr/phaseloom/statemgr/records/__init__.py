"""Pure records of what a node holds. Features import them; they import no feature."""
