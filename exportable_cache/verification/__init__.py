"""A program against the model it was made from."""
