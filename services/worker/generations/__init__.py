"""Requests that outlive their session: their records, who owns them, and how long they wait for an owner."""
