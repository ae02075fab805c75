"""Run a part of the diagnosis: `child.py PARENT LABEL PART WORD ...`, by the path of this file.

Nothing of the current folder is imported: Python puts the folder of this file first on the path, in
place of the current one, and it is removed as well. `needle` is the package around this file.
"""

import sys

if __name__ == "__main__" and sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]

import os
import traceback
from importlib.util import module_from_spec, spec_from_file_location

EXPECTED = RuntimeError, MemoryError, OSError, ValueError  # whose message says enough
SEE = "see the lines above, and docs/troubleshooting.md"


def main(parent: str, label: str, part: str, *words: str) -> None:
    from needle.diagnose import device, facts, folder, gpus, ranks, report, server
    from needle.processes import die_with

    die_with(int(parent))
    parts = {"device": device, "facts": facts, "folder": folder}
    parts |= {"gpus": gpus, "ranks": ranks, "server": server}
    try:
        parts[part].examine(*words)
    except Exception as error:
        if not isinstance(error, EXPECTED):
            traceback.print_exc()
        report.failed(label, f"{report.current}: {type(error).__name__}: {error}", SEE)
    os._exit(0)  # destructors take time, and may hang


if __name__ == "__main__":
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = spec_from_file_location("needle", os.path.join(package, "__init__.py"))
    sys.modules["needle"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["needle"])
    main(*sys.argv[1:])
