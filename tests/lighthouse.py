"""Run as `torchft_lighthouse` is: torchft's lighthouse alone, which is a library of its own,
without torch, whose import takes seconds."""

import sys
from importlib.util import find_spec
from types import ModuleType

if __name__ == "__main__":
    spec = find_spec("torchft")  # not imported
    assert spec is not None
    sys.modules["torchft"] = package = ModuleType("torchft")
    package.__path__ = spec.submodule_search_locations or []
    from torchft._torchft import lighthouse_main

    lighthouse_main()
