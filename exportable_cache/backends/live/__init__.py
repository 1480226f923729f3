"""Run a model in this process, eagerly or through torch.compile."""
