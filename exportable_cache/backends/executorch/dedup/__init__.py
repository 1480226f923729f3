"""Lower equal layers once, and keep one copy of equal weights."""
