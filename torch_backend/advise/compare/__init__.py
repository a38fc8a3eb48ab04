"""R replicas of a user's own training on one device, under any method: what `gradwire.compare`
runs."""
