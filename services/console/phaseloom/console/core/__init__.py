"""What the console makes of the decision log, without I/O: a bounded view, and messages of it."""
