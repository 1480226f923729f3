"""Patches for mechanisms that several model families share."""
