"""The running thing: a program, its position, and what a user calls."""
