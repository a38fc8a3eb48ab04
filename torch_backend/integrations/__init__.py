"""Support for other libraries: Accelerate, Lightning, transformers."""
