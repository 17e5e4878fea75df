"""Trust between state managers: certificates say who may talk, tickets who may have which files."""
