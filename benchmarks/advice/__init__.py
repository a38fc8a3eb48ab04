"""What `gradwire advise` recommends, against what is fastest: `python benchmarks/advice`."""
