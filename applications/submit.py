"""Submit an experiment to a batch system.

    python applications/submit.py config/era5-1deg.yml --dry-run
    python applications/submit.py config/era5-1deg.yml --chain auto
    python applications/submit.py config/era5-1deg.yml --mode rollout --nodes 4

Equivalent to `credit-like submit`, with the same arguments.
"""

import sys

from credit_like.cli import main

if __name__ == "__main__":
    main(["submit", *sys.argv[1:]])
