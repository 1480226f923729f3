"""Native code of this package: compiled on demand, found, and loaded."""
