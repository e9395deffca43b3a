"""Moves of requests between workers."""
