"""Connections to the other processes of the plane, over TLS where they have certificates."""
