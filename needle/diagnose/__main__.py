"""python -m needle.diagnose"""

import sys

from needle.diagnose.command import main

if __name__ == "__main__":
    sys.exit(main())
