"""Pure rules: the permits that an agent takes, and the parts of a weights version that a rank
reads."""
