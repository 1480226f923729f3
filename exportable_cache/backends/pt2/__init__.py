"""Target `pt2`: one torch.export archive with every method, the weights once, opened anywhere torch runs."""
