"""python -m ringattn: the same as the console script."""

from .cli import main

if __name__ == "__main__":
    main()
