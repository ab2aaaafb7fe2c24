"""`python -m ltm`: the command line, also where no script `ltm` is on the path."""

import sys

from ltm.cli import main

if __name__ == "__main__":
    sys.exit(main())
