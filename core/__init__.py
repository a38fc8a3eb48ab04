"""The half without a framework of gradwire: algorithms, requests, kernels' protocol, simulator. NumPy is its only dependency."""
