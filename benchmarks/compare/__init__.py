"""What `gradwire compare` may promise: `python benchmarks/compare`."""
