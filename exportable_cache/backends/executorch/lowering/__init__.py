"""Lower exported programs to one `.pte` file."""
