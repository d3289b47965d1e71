"""`python -m sdpa_router` is `sdpa-router`."""

import sys

from sdpa_router.cli import main

if __name__ == "__main__":
    sys.exit(main())
