"""One method per file: what a method computes, and what it asks the other replicas for."""
