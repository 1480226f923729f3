"""Patches for one model family each."""
