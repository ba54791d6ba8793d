"""Measure the loading of an experiment's data on this machine.

    python applications/benchmark.py config/demo.yml

The same as `credit-like bench-data`, with the same arguments.
"""

import sys

from credit_like.cli import main

if __name__ == "__main__":
    main(["bench-data", *sys.argv[1:]])
