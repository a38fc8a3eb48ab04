"""The backend-neutral half of gradwire: algorithms, requests, kernels' protocol, simulator. NumPy is its only dependency."""
