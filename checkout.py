"""Choose the needle that the scripts of this checkout import."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def choose() -> None:
    """Put the checkout first on sys.path. Where its needle is not built, that becomes the installed
    one (needle/__init__.py)."""
    sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    try:
        import needle  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"needle: error: {error}") from error
