"""`ltm serve` in a process of its own that says on standard error which files it writes."""

import os
import sys
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_MAKING = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Name what is opened for writing, made or moved."""
    path: Any = None
    if event == "open" and (arguments[2] or 0) & _WRITING:
        path = arguments[0]
    elif event in _MAKING:
        path = arguments[_MAKING[event]]
    if isinstance(path, (str, Path)):
        os.write(2, f"wrote {Path(path).absolute()}\n".encode())


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.addaudithook(watch)
    from ltm.cli import main

    sys.argv[1:1] = ["serve"]
    sys.exit(main())
