"""File descriptors: the limit of a process, and how it is shared between clients and the process itself."""
