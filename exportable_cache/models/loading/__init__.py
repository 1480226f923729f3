"""Find, check and load models."""
