"""What waits for a client that reads slowly, and for how long."""
