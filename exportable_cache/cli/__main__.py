"""`python -m exportable_cache.cli`, for where the script is not on the path."""

from . import main

main()
