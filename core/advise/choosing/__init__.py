"""Which of several methods averages a training, found while it runs."""
