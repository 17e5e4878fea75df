"""Trust between state managers: certificates say who may talk, tickets which files a node may
have."""
