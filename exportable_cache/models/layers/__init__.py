"""What each layer of a model keeps, read from the model by running one token through it."""
