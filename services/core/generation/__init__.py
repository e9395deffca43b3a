"""Answers that outlive their client's connection and their frontend: what identifies them, and how far a client is."""
