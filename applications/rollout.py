"""Compute the forecasts of a trained experiment.

    python applications/rollout.py config/demo.yml
    torchrun --nproc-per-node 4 applications/rollout.py config/era5-1deg.yml

Equivalent to `credit-like rollout`, with the same arguments.
"""

import sys

from credit_like.cli import main

if __name__ == "__main__":
    main(["rollout", *sys.argv[1:]])
