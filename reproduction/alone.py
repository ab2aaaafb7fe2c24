"""Train in processes of its own: `python -m reproduction.alone CONFIG FOLDER`.

Fabric starts the further processes of several devices by running this again.
"""

import sys
from pathlib import Path


def main(config: str, folder: str) -> None:
    """Train with the settings of a file, going on where an interrupted run stopped."""
    from ltm.training.run import train  # noqa: PLC0415
    from ltm.training.settings import read_settings  # noqa: PLC0415

    train(read_settings(Path(config)), folder, resume="auto")


if __name__ == "__main__":
    main(*sys.argv[1:])
