"""Training states: their types, where they lie on the devices, and their saved forms."""
