"""The folder on disk: manifest, files, checks."""
