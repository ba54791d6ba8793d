"""Run the command line with `python -m credit_like`."""

from credit_like.cli import main

if __name__ == "__main__":
    main()
