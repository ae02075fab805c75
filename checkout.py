"""Which needle the scripts of this checkout use: the checkout's own where it is built for this
Python (`make lib`), else the installed one. A script puts the checkout's root first on sys.path and
imports this."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

if not any((ROOT / f"needle/_C{end}").exists() for end in importlib.machinery.EXTENSION_SUFFIXES):
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]
    if importlib.util.find_spec("needle") is None:
        raise SystemExit(
            f"needle: error: needle is neither built in {ROOT} (make lib) nor installed for "
            f"{sys.executable} (pip install .)"
        )
