"""What a step will send, computed without data; and whether it is worth it."""
