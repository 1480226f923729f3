"""Quantized linear layers and embedding tables."""
