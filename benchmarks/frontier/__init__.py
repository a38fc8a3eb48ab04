"""Every method on one model and one text: loss against bytes and against time; see `__main__`."""
