"""Attention and cache layers in the forms that the ExecuTorch runtime computes."""
