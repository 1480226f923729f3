"""Access to private names of torch, transformers, executorch and torch_tensorrt, with one module per package.

No private name of torchao is used. Each module lists the version in which a name was seen and what happens without it;
`tests/compat` has a canary for each name. A module here imports only torch or transformers at the top; other packages
are imported by its functions.
"""
