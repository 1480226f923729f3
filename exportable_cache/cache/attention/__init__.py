"""Attention over a static cache, in the signatures that transformers calls."""

ATTENTION = "exportable_cache"
MATMUL_ATTENTION = "exportable_cache_matmul"
ATTENTION_NAMES = (ATTENTION, MATMUL_ATTENTION)
