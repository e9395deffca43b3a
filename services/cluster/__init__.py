"""The local cluster: a registry, workers and frontends as child processes on one machine."""
