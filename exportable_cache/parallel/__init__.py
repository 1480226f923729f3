"""Models that are split over processes: by heads, by layers, or by context."""
