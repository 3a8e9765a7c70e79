"""python -m ringattn: the same as the console script."""

from .cli.main import main

if __name__ == "__main__":
    main()
