"""Makes `dummy` (the stage factories of the cases), `planning` and `tests/plan_cases.py` importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (str(HERE), str(HERE.parent.parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
