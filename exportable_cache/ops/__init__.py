"""Operators of our own: each with its schema, eager and fake implementations, and the oracle it is tested against."""
