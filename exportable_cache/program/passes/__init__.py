"""Graph passes over traced methods."""
