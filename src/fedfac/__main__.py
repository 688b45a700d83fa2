"""``python -m fedfac`` is the command ``fedfac``, also where its script is not on the path."""

import sys

from fedfac.cli import main

if __name__ == "__main__":
    sys.exit(main())
