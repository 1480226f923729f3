"""Delegates by name, and how each one partitions a graph."""
