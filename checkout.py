"""Choose the needle that scripts of this checkout import. As a program: the command `needle`."""

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


if __name__ == "__main__":
    choose()
    from needle.command import main

    sys.exit(main())
