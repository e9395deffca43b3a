"""The local cluster: a registry, workers and frontends as processes of this machine, kept alive by their parent."""
