"""The folder of the project, for the scripts of this folder. Import this before torch."""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import minispec  # noqa: E402, F401  it tunes the allocator
