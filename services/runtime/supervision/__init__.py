"""Supervision of child processes: start, watch, restart and stop."""
