"""Target `tensorrt`: one engine per method with an in-place cache, built and verified without a GPU."""
