"""The command that runs this program in a child process."""

import sys

PROGRAM = (sys.executable, "-P", "-m", "services")
"""-P: Python does not import a folder `services` from the current directory."""
