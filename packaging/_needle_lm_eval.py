"""Makes `lm_eval --model needle` work. The LM evaluation harness knows the models of its own table
and offers no way to add one from outside, so this adds a line to that table when the harness loads
it. needle_lm_eval.pth, installed beside it, imports it whenever Python starts: it must stay this
small and import nothing, neither needle nor the harness.
"""

import sys


class HarnessWatch:
    """A finder of modules that waits for `lm_eval.models`, the file of the table, and then goes."""

    def find_spec(self, name, path, target=None):
        if name != "lm_eval.models":
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module):
                load(module)
                register()

            spec.loader.exec_module = load_and_register
        return spec


def register():
    try:
        from lm_eval.api.registry import model_registry
    except ImportError:  # before 0.4.10 the table held classes, not names: python -m needle.lm_eval
        return
    if "needle" not in model_registry:
        model_registry.register("needle", target="needle.lm_eval:NeedleLM")


sys.meta_path.insert(0, HarnessWatch())
