"""Delegates of ExecuTorch: `table.py` says what each one wants, and a module each has its compiler."""
