"""What compression costs on a GPU; see `__main__`."""
