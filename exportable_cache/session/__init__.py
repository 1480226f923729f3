"""Running programs: the session, its state, and the inputs of its steps."""
