"""The engine protocol: every engine package has one engine, with the methods of the protocol."""

import importlib
import inspect
import pkgutil

import pytest

from services.worker import engines
from services.worker.engine import Engine

PACKAGES = [module.name for module in pkgutil.iter_modules(engines.__path__) if module.ispkg]
METHODS = ["tokenizer_content", "run", "submit", "cancel", "load"]
EXTRAS = {"llamacpp": ["cyllama", "llguidance"]}
"""The optional packages that an engine package imports."""


def engine_class(package: str) -> type:
    for extra in EXTRAS.get(package, ()):
        pytest.importorskip(extra)
    module = importlib.import_module(f"{engines.__name__}.{package}")
    [found] = [getattr(module, name) for name in module.__all__ if name.endswith("Engine")]
    assert isinstance(found, type)
    return found


def test_list_of_methods_is_that_of_the_protocol() -> None:
    defined = {name for name, value in vars(Engine).items() if inspect.isfunction(value) and not name.startswith("_")}

    assert defined == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("package", PACKAGES)
def test_engine_has_the_method_with_the_parameters_of_the_protocol(package: str, method: str) -> None:
    wanted, found = getattr(Engine, method), getattr(engine_class(package), method)

    assert list(inspect.signature(found).parameters) == list(inspect.signature(wanted).parameters)
    assert inspect.iscoroutinefunction(found) is inspect.iscoroutinefunction(wanted)
