"""Patches for models that keep a cache of their own instead of taking one of transformers."""
