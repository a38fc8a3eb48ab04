"""What runs programs on this rank, and answers their requests with collectives."""
