"""Patches of transformers' modeling files: a file per model family, and one registry."""
