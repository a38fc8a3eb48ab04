"""The names of `torch.distributed`, with torch's arguments."""
