"""python -m needle.diagnose"""

import sys

from needle.diagnose.command import main
from needle.processes import program

if __name__ == "__main__":
    sys.exit(program(main))
