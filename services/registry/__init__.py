"""The registry: which instances there are. Start with service.py."""
