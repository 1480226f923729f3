"""Eager models with what a cache does done to them by other means."""
