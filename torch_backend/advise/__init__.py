"""What `gradwire.advise` measures with torch."""
