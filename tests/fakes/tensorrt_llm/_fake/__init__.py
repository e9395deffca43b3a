"""What the real package does not have: its engine, played by a thread."""
