"""Attention over a static cache, in the signatures that transformers calls."""
