"""An algorithm's memory on this rank, and its saved forms."""
