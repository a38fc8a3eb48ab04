"""A training that chooses among compiled steps while it runs."""
