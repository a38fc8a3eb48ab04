"""The names of `torch.distributed`, with torch's arguments."""

from gradwire.core.deprecated import old_module

# Under this path states were pickled when it was one module.
__getattr__ = old_module(__name__, "gradwire.torch_backend.compat.hooks")
