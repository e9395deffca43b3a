"""Makes `python -m services` the same as `unbroken`."""

from services.cli import main

if __name__ == "__main__":
    main()
