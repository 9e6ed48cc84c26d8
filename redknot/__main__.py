"""`python -m redknot VERB ...` is `redknot VERB ...`."""

import sys

from redknot.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
