"""The HTTP server: accepts connections, and what all versions of HTTP share."""
