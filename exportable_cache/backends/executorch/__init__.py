"""Target `executorch`: one `.pte` with every method, the weights once, and one cache that the methods share."""
