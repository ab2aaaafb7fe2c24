"""`python -m reproduction list | beside | NAME`, the same as `ltm table ...`."""

import sys

from ltm.cli import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(arguments if arguments[:1] == ["table"] else ["table", *arguments]))
