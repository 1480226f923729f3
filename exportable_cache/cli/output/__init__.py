"""Output of commands: streams, tables, and the messages of other libraries."""
