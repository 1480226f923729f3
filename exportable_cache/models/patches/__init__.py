"""What is replaced in other people's code: one module per package, every patch with its reason, its link and a test of need."""
