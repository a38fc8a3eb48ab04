"""What a run says about itself: bytes, times, errors, skipped steps."""
