"""`python -m modelrunner`: the command line."""

import sys

from modelrunner.cli import main

if __name__ == "__main__":
    sys.exit(main())
