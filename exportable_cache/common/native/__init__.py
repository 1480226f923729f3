"""Native code of this package: how it is compiled on demand, found and loaded."""
