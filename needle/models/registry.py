"""Models by name: how checkpoints, command lines and folders of transformers find a class.

A model is a Module with a configuration: `@register("name")` on a class whose `config_class` is a
frozen dataclass derived from Config, and whose constructor takes (config, device=None). Import
the module that registers a model before loading its checkpoints; Pythia is always registered.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from needle import init
from needle.backend_ndarray import cpu
from needle.command import argument_type
from needle.files import FileError, named, reading
from needle.nn import Module

_families: dict[str, type[Module]] = {}

PASSING = ("training", "recompute", "fp8")  # settings of a module that no checkpoint holds
AnyModel = TypeVar("AnyModel", bound=type[Module])
AnyConfig = TypeVar("AnyConfig", bound="Config")


class Config:
    """The base of configurations, which are frozen dataclasses."""

    family: ClassVar[str]  # set by register()
    model_class: ClassVar[type[Module]]  # the same

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        """Models by name: the fields of each that are not at their defaults."""
        return {}

    @classmethod
    def preset(cls: type[AnyConfig], name: str, **changes: Any) -> AnyConfig:
        """The configuration of this name, with fields changed."""
        presets = cls.presets()
        if name not in presets:
            raise ValueError(f"no preset {name!r}; there are {', '.join(presets)}")
        return cls.from_dict({**presets[name], **changes})

    @classmethod
    def from_dict(cls: type[AnyConfig], fields: Mapping[str, Any]) -> AnyConfig:
        """The configuration of these fields; a list, as files have it, is a tuple where the default
        is one."""
        own = {field.name: field.default for field in dataclasses.fields(cls)}
        unknown = sorted({*fields} - {*own})
        if unknown:
            raise ValueError(
                f"{cls.__name__}: unknown fields {', '.join(unknown)}; there are {', '.join(own)}"
            )
        given = dict(fields)
        for name, value in fields.items():
            if isinstance(value, list) and isinstance(own[name], tuple):
                given[name] = tuple(value)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def meta_model(self, device: Any = None, cls: Any = None) -> Any:
        """The model of this configuration, as shapes without memory: see init.meta_device(). cls:
        its class, where that is not the registered one."""
        with init.meta_device():
            return (cls or self.model_class)(self, device=cpu() if device is None else device)

    def misfits(self, module: Module) -> list[str]:
        """Return the parts of `module`, and their public settings, as a norm's eps or the heads of
        attention, that differ from those that this configuration makes, which loading gives."""

        def parts(of: Module) -> dict[str, str]:
            tensors = [*of.named_parameters(), *of.named_buffers()]
            found = {}
            for name, part in of.named_modules():
                kind = type(part)
                found |= {name: f"{kind.__module__}.{kind.__qualname__}"} if name else {}
                for key, x in vars(part).items():
                    setting = key[0] != "_" and key not in PASSING
                    if setting and isinstance(x, (bool, int, float, str)):
                        found[f"{name}.{key}".lstrip(".")] = repr(x)
            return found | {name: f"{x.dtype} of shape {list(x.shape)}" for name, x in tensors}

        own, made = parts(module), parts(self.meta_model())
        wrong = [f"{name} is missing" for name in made if name not in own]
        wrong += [f"{name} is unknown" for name in own if name not in made]
        return wrong + [
            f"{n} is {own[n]}, not {made[n]}" for n in own if own[n] != made.get(n, own[n])
        ]


def register(name: str) -> Callable[[AnyModel], AnyModel]:
    """Decorate a class: its checkpoints have this `name`, and `preset()` knows its presets.

    ValueError where another class has the name, or one of the presets' names."""

    def decorate(cls: AnyModel) -> AnyModel:
        config, old = cls.config_class, _families.get(name)
        if old is not None and old.__qualname__ != cls.__qualname__:
            raise ValueError(f"register: {name!r} is {old.__qualname__} already")
        if vars(config).get("family", name) != name:
            raise ValueError(f"register: {config.__name__} belongs to {config.family!r} already")
        for family, other in _families.items():
            taken = config.presets().keys() & other.config_class.presets().keys()
            if family != name and taken:
                raise ValueError(f"register: {family!r} has a preset {min(taken)!r} already")
        config.family, config.model_class = name, cls
        _families[name] = cls
        return cls

    return decorate


def class_of_transformers(model_type: Any) -> type[Module]:
    """Return the registered class of a model_type of transformers' config.json; else ValueError. A
    class that inherits its weight_mapping leaves the model_type to its base."""
    classes: dict[str, type[Module]] = {}
    for cls in _families.values():
        mapping = getattr(cls, "weight_mapping", None)
        if mapping and ("weight_mapping" in vars(cls) or mapping.MODEL_TYPE not in classes):
            classes[mapping.MODEL_TYPE] = cls
    if not isinstance(model_type, str) or model_type not in classes:
        raise ValueError(
            f"model_type is {model_type!r:.40}; needle reads {', '.join(classes)} only"
        )
    return classes[model_type]


def model_class(name: str) -> type[Module]:
    """The class that is registered under a name."""
    if name not in list(_families):  # from a file it may be anything
        raise ValueError(
            f"no model {name!r} is registered; there are {', '.join(_families)}. Import the module "
            "that registers it; a command does by --import FILE"
        )
    return _families[name]


def import_file(path: str | os.PathLike) -> str:
    """Run a Python file that registers models, once; return its absolute path. It imports the files
    beside it. FileError where there is none."""
    file = named(path).resolve()
    name = f"needle_import_{file}".replace(".", ":")  # pickle looks for the package before a dot
    if name not in sys.modules:
        with reading(file):
            spec = importlib.util.spec_from_file_location(name, file)
        if spec is None:
            raise FileError(f"{file}: not a Python file: its name must end in .py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.append(str(file.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return str(file)


def preset_names() -> list[str]:
    """The presets of all registered models.

    >>> ndl.models.preset_names()[:3]
    ['tiny', 'pythia-14m', 'pythia-31m']
    """
    return [name for cls in _families.values() for name in cls.config_class.presets()]


def preset(name: str, **changes: Any) -> Config:
    """The configuration of a preset of any registered model, with fields changed.

    >>> ndl.models.preset("pythia-70m", dtype="bfloat16").hidden_size
    512
    """
    for cls in _families.values():
        if name in cls.config_class.presets():
            return cls.config_class.preset(name, **changes)
    raise ValueError(f"no preset {name!r}; there are {', '.join(preset_names())}")


IMPORT = "run this Python file first, which registers a model of one's own (models.register)"
imported = argument_type(import_file)  # the type of --import
