"""Attention over a static cache, in the signatures that transformers calls."""

ATTENTION = "exportable_cache"
MATMUL_ATTENTION = "exportable_cache_matmul"
#: Over a cache whose slots are split over processes.
RANKS_ATTENTION = "exportable_cache_ranks"
ATTENTION_NAMES = (ATTENTION, MATMUL_ATTENTION, RANKS_ATTENTION)
