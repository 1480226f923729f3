"""The static form: fixed lengths, no state inside, nothing computed from positions; for NPUs."""
