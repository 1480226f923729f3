"""Traceable modules of a model with its cache, one per method."""
