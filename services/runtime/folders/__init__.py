"""Folders that this program writes to, and what to do where it may not."""
