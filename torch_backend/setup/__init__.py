"""What happens once, before the first step: an algorithm is tried out, ranks are compared, process
groups are made."""
