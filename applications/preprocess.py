"""Fit the statistics of an experiment's data and audit the data.

    python applications/preprocess.py config/demo.yml
    python applications/preprocess.py config/era5-1deg.yml

Equivalent to `credit-like preprocess`, with the same arguments.
"""

import sys

from credit_like.cli import main

if __name__ == "__main__":
    main(["preprocess", *sys.argv[1:]])
