"""State managers among themselves: who may talk (certificates) and who may have what (tickets)."""
