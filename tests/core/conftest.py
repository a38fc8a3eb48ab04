"""ml_dtypes teaches NumPy the name bfloat16."""

import ml_dtypes  # noqa: F401
