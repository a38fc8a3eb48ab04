"""What a comparison of methods on a user's training says, and from what on it may say something."""
