"""`python -m redknot.build_artifacts CORPUS ...` is `redknot build CORPUS ...`."""

import sys

from redknot.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
