"""Comparison of a program with the model it was made from."""
