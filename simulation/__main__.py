"""python -m simulation"""

from simulation.runtime.determinism import install

install()

from simulation.cli import main  # noqa: E402  # What it imports binds the clock.

main(prog_name="python -m simulation")
