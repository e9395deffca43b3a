"""The registry: the set of registered instances. Start reading at service.py."""
