"""Pure rules: which permits an agent takes, and what of a weights version a rank reads."""
