"""Tokenizers of registered models, and the text of tokens while they are drawn."""
