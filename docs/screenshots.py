"""The pictures of `docs/reference/file_format.md`: those of the screenshots that `make test-viewers` has just taken."""

from __future__ import annotations

import shutil
from pathlib import Path

DOCS = Path(__file__).parent
TAKEN = DOCS.parent / "build" / "viewers" / "screenshots"
SHOWN = ("h5web-trajectories", "h5web-colours", "h5web-vectors", "silx-metrics", "silx-trajectories", "silx-weights")


def main() -> None:
    for name in SHOWN:
        shutil.copy(TAKEN / f"{name}.png", DOCS / "images")
        print(f"docs/images/{name}.png")


if __name__ == "__main__":
    main()
