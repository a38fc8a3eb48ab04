"""What `gradwire doctor` asks: known answers, how far an answer may be from them, and the report of
what was found. No framework is in it."""
