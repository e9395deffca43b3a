"""The worker: one engine behind an exact dispatcher. Start with server.py."""
