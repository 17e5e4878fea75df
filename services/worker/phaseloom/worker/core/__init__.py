"""Pure rules: which permits are taken, what of a weights version a rank reads, what is counted."""
