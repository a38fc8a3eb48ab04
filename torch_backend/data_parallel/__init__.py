"""A wrapper of a module, instead of `DistributedDataParallel`."""
