"""Clients of the registry: a worker's registration and a frontend's watch."""
