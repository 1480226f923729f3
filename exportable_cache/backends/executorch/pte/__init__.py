"""Checks and edits of `.pte` files."""
