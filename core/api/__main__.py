"""`python -m gradwire`: the command line, see `gradwire.cli`."""

from gradwire.cli.app import main

if __name__ == "__main__":
    main()
