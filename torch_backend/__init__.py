"""gradwire for PyTorch."""
