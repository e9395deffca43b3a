"""What happens in a run, and what must come of it."""
