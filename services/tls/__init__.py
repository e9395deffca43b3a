"""TLS: certificates that change while the process runs, and connections that behave as those of plain TCP do."""
