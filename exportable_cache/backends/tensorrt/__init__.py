"""Target `tensorrt`: one engine per method, its cache written in place, built and checked without a GPU."""
