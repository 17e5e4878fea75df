"""Things that all parts of one state manager share: records, memory, moves, handles, digests."""
