"""Entry point of `python -m exportable_cache`, for environments without the script on the path."""

from .cli import main

main()
