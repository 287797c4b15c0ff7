"""Puts the recipe on the path: it is a program of its own, not a part of the package ``quire``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "quill"))
