"""HTTP for every process: applications with routes, errors, CORS and JSON, on the server in `server/`."""
