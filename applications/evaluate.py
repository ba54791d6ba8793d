"""Score the forecasts of an experiment.

    python applications/evaluate.py config/demo.yml
    python applications/evaluate.py config/era5-1deg.yml

Equivalent to `credit-like evaluate`, with the same arguments.
"""

import sys

from credit_like.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
