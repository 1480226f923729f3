"""Where and how commands write: streams, tables, and the output of other libraries."""
