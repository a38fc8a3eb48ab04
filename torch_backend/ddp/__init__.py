"""An algorithm as a communication hook of `DistributedDataParallel`."""
