"""Token generation: sampling, decode loops, speculation, and conversion to text."""
