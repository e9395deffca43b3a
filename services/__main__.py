"""`python -m services` is `unbroken`."""

from services.cli import main

if __name__ == "__main__":
    main()
