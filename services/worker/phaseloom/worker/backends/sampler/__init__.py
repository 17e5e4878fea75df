"""The `sampler` backend: generation and log-probabilities by torch and `transformers`."""
