"""The parts that the real package does not have: an engine that runs in a thread."""
