"""Array operations that need no framework: in NumPy, for shapes without data, orthonormalization, random numbers."""
