"""The times at which nodes are free in the coming hours: a ring of slots, a capacity tree, free
ranges of each node."""
