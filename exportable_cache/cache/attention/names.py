"""Names of our attention implementations, as transformers' configs hold them. Importing them imports no model code."""

ATTENTION = "exportable_cache"
MATMUL_ATTENTION = "exportable_cache_matmul"
ATTENTION_NAMES = (ATTENTION, MATMUL_ATTENTION)
