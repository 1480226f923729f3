"""Static KV caches: layers, slot policies, storages, layouts and attention over their slots."""
