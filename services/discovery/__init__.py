"""Clients of the registry: the registration of a worker and the watch of a frontend."""
