"""The worker: one engine behind an exact dispatcher. Start reading with server.py."""
