"""Settings of the whole process: threads, garbage collection, output of other libraries."""
