"""A model with its cache as traceable modules, one for each method."""
