"""What every process runs on: event loop, signals, logs, tasks and sockets."""
