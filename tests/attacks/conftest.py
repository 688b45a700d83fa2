"""Attacks: what a lying server and a lying node try. They stay here, and they fail."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers, loopback
