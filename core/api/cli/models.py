"""What MODEL means on the command line: parameters by name, from a file or from a function, without
memory for their values."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.cli.pretrained import built_by_default, built_from_config, is_configuration
from gradwire.cli.shape_files import specs_in
from gradwire.core.ops import Spec
from gradwire.core.plan.parameters import specs_of
from gradwire.core.state.files import is_written_through
from gradwire.core.text.wording import meant

FILES = (".safetensors", ".json")
FORMS = (
    "give module:callable, a .safetensors file, a config.json of transformers, or a .json of shapes"
)


class BadArgument(ValueError):
    """An argument of the command line that cannot be used. The message names it, its value and the
    fix."""


def require_folder(option: str, path: Path) -> None:
    """Raise BadArgument, before anything is measured or trained, for a file that nobody can
    write."""
    if not path.parent.is_dir():
        raise BadArgument(f"{option} {path}: there is no folder {path.parent}")
    if is_written_through(path) and not path.is_dir():
        return
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        what = f"{path} is a folder" if path.is_dir() else f"{path.parent} may not be written to"
        raise BadArgument(f"{option} {path}: {what}; give the name of a file elsewhere")


@dataclass(frozen=True)
class Model:
    """Parameters, and whose they are: "torch", "jax", or "" where a file does not say."""

    specs: dict[str, Spec]
    framework: str


def load_model(text: str) -> Model:
    """The parameters of MODEL. Raises BadArgument."""
    path = Path(text)
    if path.suffix in FILES and ":" not in text:
        try:
            if path.suffix == ".json" and is_configuration(path):
                return _built(text, built_from_config(path))
            return Model(specs_in(path), "")
        except FileNotFoundError as error:
            lacks = (
                "" if error.filename in (None, text) else f" as {error.filename}, which it names"
            )
            raise BadArgument(f"MODEL {text}: there is no such file{lacks}") from error
        except OSError as error:
            raise BadArgument(f"MODEL {text}: {error.strerror}") from error
        except ValueError as error:
            raise BadArgument(f"MODEL {error}") from error
    built = _built(text, built_by_default(load_callable(text, "MODEL")))
    if not built.specs:
        raise BadArgument(
            f"MODEL {text!r} returns nothing that is trained; return the model, with parameters"
            " that require gradients"
        )
    return built


@contextmanager
def of_users() -> Iterator[None]:
    """What a user's module finds when it is imported, and when what it has is called: modules that
    are here, as for `python -m`, and none of this command's arguments."""
    arguments, sys.argv = sys.argv, sys.argv[:1]
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.argv = arguments
        sys.path.remove("")


def load_callable(text: str, argument: str) -> Callable[[], Any]:
    """What `module:callable` names, of a module here or installed. Raises BadArgument."""
    module, colon, name = text.partition(":")
    if colon and name and (module.endswith(".py") or "/" in module):
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise BadArgument(
            f"{argument} {text!r}: {module} is a file; name its module, {dotted}:{name}, from the"
            " folder that it is found in"
        )
    if not colon or not module or not name or module.startswith("."):
        raise BadArgument(
            f"{argument} {text!r}: {FORMS if argument == 'MODEL' else 'give module:callable'}"
        )
    found = _imported(module, f"{argument} {text!r}")
    for part in name.split("."):
        if not hasattr(found, part):
            known = [each for each in dir(found) if not each.startswith("_")]
            fix = meant(part, known, f"name something that {module} has")
            raise BadArgument(f"{argument} {text!r}: {module} has no {part}; {fix}")
        found = getattr(found, part)
    if not callable(found):
        raise BadArgument(
            f"{argument} {text!r} is of type {type(found).__name__}; name a function without"
            " arguments"
        )
    return found  # type: ignore[no-any-return]


def _imported(module: str, said: str) -> Any:
    """A module here or installed. Raises BadArgument."""
    try:
        with of_users():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if module == error.name or module.startswith(f"{error.name}."):
            raise BadArgument(f"{said}: {error}") from error
        raise BadArgument(f"{said}: {_whose(error, module)}") from error
    except (Exception, SystemExit) as error:
        raise BadArgument(f"{said}: {_whose(error, module)}") from error


def _whose(error: BaseException, module: str) -> str:
    """That a module of the user's failed when it was imported, where, and what to do if it is a
    script."""
    where = [f"{file}:{line}" for file, line in _frames(error)]
    own = [each for each in where if not each.startswith((__file__, *_installed()))]
    kind = (
        "ended with status" if isinstance(error, SystemExit) else f"raised {type(error).__name__}:"
    )
    fix = "what trains, or reads arguments, belongs under `if __name__ == '__main__':`"
    if isinstance(error, ModuleNotFoundError):
        fix = f"install {error.name} beside gradwire"
    return f"to import {module} {kind} {error} (at {own[-1] if own else where[-1]}); {fix}"


def place_of_users(error: BaseException) -> str:
    """The place, "file:line", at which somebody's function that gradwire has called has raised
    this; "" if gradwire has."""
    ours = tuple(
        folder
        for room in ("", ".core", ".torch_backend", ".jax_backend")
        if (spec := importlib.util.find_spec(f"gradwire{room}")) is not None
        for folder in spec.submodule_search_locations or ()
    )
    frames = _frames(error)
    last = max((i for i, (file, _) in enumerate(frames) if file.startswith(ours)), default=-1)
    own = [f"{f}:{n}" for f, n in frames[last + 1 :] if not f.startswith(_installed())]
    return own[-1] if own else ""


def _frames(error: BaseException) -> list[tuple[str, int]]:
    return [
        (frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]


def _installed() -> tuple[str, ...]:
    """The folders of what is installed."""
    found = (sysconfig.get_path(x) for x in ("stdlib", "platstdlib", "purelib", "platlib"))
    return tuple(found)


def _built(text: str, build: Callable[[], Any]) -> Model:
    """The model that a function returns, run where it takes no memory."""
    loaded = [name for name in ("torch", "jax") if name in sys.modules]
    # What a function imports itself comes too late, so all that it may mean is loaded.
    present = loaded or [
        name for name in ("torch", "jax") if importlib.util.find_spec(name) is not None
    ]
    meta: Any = (
        importlib.import_module("torch").device("meta") if "torch" in present else nullcontext()
    )
    trace: Any = (
        importlib.import_module("gradwire.jax_backend.advise.model_shapes")
        if "jax" in present
        else None
    )
    try:
        with meta:
            made = build() if trace is None else trace.abstract_parameters(build)
        if hasattr(made, "named_parameters"):
            return Model(specs_of(made), "torch")
        if trace is not None:
            return Model(trace.specs_of_parameters(made), "jax")
        return Model(specs_of(made), "")
    except (Exception, SystemExit) as error:
        raise BadArgument(
            f"MODEL {text!r} cannot be built without memory for its weights"
            f" ({type(error).__name__}: {error}). It is called without arguments, on torch's meta"
            " device or inside jax.eval_shape: it must return the model and load nothing"
        ) from error
