"""Files: atomic writes, tensors in files, and files that only the current user can have written."""
