"""Patches for recurrent models and layers, whose states move into the cache."""
