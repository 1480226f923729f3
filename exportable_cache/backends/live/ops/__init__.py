"""Native operators of compiled steps: linear layers of few rows, attention of few queries, oneDNN."""
