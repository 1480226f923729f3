"""Specs of a model's layers and inputs, read from the model by running one token through it."""
