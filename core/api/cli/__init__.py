"""The command line: `gradwire plan`, `gradwire probe`, `gradwire advise`, `gradwire compare`.

Each command reads its arguments, calls a function of the library, and prints what that returns.
Frameworks are loaded by the commands that need one.
"""

import sys


def main() -> None:
    """Run the command. Raises SystemExit, also where its packages are missing, which the bare
    library does without."""
    try:
        from gradwire.cli.app import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        raise SystemExit(
            f"gradwire: the command line needs {error.name}; pip install 'gradwire[cli]'"
        ) from None
    try:
        run()
    except KeyboardInterrupt:  # before the command began, or while it ends
        print("gradwire: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
