"""Options, names and rates as people write them, and how messages are worded."""
