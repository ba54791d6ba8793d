"""Plan the layout of a training run without a GPU.

    python applications/plan.py config/era5-1deg.yml --gpus 32 --gpu a100-40gb --grid 181x360
    python applications/plan.py config/era5-1deg.yml --gpus 8,16,32,64 --json

Equivalent to `credit-like plan`, with the same arguments.
"""

import sys

from credit_like.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
