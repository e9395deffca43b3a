"""Streamed answers as server-sent events."""
