"""The connection from a frontend to a worker."""
