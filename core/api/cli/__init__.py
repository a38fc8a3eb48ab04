"""The command line: `gradwire plan`, `gradwire probe`, `gradwire advise`.

Each command reads its arguments, calls a function of the library, and prints what that returns. Frameworks are loaded by the commands that need one.
"""
