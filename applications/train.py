"""Train an experiment. A script for `torchrun`; `python -m credit_like.cli train` does the same.

    python applications/train.py config/demo.yml
    torchrun --nproc-per-node 4 applications/train.py config/era5-1deg.yml --set trainer.epochs=2

Equivalent to `credit-like train`, with the same arguments.
"""

import sys

from credit_like.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
