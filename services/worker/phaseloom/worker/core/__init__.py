"""Pure decision logic: which permits an agent accepts, and which bytes of a weights version a rank
reads."""
