"""Which needle the scripts of this checkout import."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def choose() -> None:
    """Put the checkout's own needle first on sys.path where it is built for this Python (`make
    lib`), and leave it out where it is not, so that the installed one is found."""
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]
    ends = importlib.machinery.EXTENSION_SUFFIXES
    if any((ROOT / f"needle/_C{end}").exists() for end in ends):
        sys.path.insert(0, str(ROOT))
    elif importlib.util.find_spec("needle") is None:
        raise SystemExit(
            f"needle: error: needle is neither built in {ROOT} (make lib) nor installed for "
            f"{sys.executable} (pip install .)"
        )
