"""Accepts connections, health checks first, and answers those for which there is no room."""
