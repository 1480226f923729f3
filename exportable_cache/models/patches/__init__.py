"""What is replaced in transformers' modeling files: a file per family of models, and one registry."""
