"""The metrics of a frontend, and the log line of each request."""
