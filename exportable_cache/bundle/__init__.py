"""Bundles: the folder that an export writes, its manifest, and the checks of its files."""
