"""``python -m ampdbg`` is the ``ampdbg`` program."""

from .commands.app import main

if __name__ == "__main__":
    main()
