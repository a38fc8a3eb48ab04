"""Local SGD in a training loop."""
