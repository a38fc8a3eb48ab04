"""Process groups, the ranks of a node, and what ranks tell each other on the host."""
