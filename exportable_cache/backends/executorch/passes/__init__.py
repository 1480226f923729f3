"""Rewrites of exported graphs before they are lowered."""
