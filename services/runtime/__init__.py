"""The base of every process: event loop, signals, logs, tasks and sockets."""
