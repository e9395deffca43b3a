"""The OpenAPI document of the HTTP API."""
