"""What a step will send, computed without data; and how long that takes on a link."""
