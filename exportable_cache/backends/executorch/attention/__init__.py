"""Attention and cache layers for the ExecuTorch runtime."""
