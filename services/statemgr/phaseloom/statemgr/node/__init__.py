"""What all parts of one state manager share: books, memory, handles, digests."""
