"""`python -m gradwire`: the command line, see `gradwire.cli`."""

from gradwire.cli import main

if __name__ == "__main__":
    main()
