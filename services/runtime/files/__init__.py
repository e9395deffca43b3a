"""Files that operators change while a process runs, and files that a program replaces."""
