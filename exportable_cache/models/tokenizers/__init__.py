"""Tokenizers of models and of bundles."""
