"""The HTTP server application: routing, errors, CORS, JSON."""
