"""The console's view of the decision log and the messages to its pages, without I/O."""
