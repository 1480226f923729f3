"""`python -m exportable_cache`: the command line, for where its script is not on the path."""

from .cli import main

main()
