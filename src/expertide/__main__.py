"""`python -m expertide` is `expertide`."""

from expertide.cli.main import main

if __name__ == "__main__":
    main()
