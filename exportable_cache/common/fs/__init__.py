"""Files: atomic writes, mapped files, and files that only this user can have written."""
