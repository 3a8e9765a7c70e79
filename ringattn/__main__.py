"""`python -m ringattn`: the same as the command `ringattn`."""

from .cli.main import main

if __name__ == "__main__":
    main()
