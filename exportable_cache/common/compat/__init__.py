"""Every private name of torch, transformers, executorch and torch_tensorrt that is used: a module for each package.

Of torchao none is used.

Each accessor says in which version the name was seen and what happens without it; tests/compat has a canary for each.
Importing a module here imports no package that an accessor of it needs, but torch and transformers themselves.
"""
