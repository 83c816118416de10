"""`python -m jaxpara`: the same as the command `jaxpara`."""
import sys

from jaxpara.cli import main

if __name__ == "__main__":
    sys.exit(main())
