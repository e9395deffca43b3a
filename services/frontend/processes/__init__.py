"""A frontend that runs as several processes on the same ports."""
