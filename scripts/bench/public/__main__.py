"""Public measurements and recipes of training next to plans of the same.

python -m scripts.bench.public steps                             measured steps, and how far times by formula are off
python -m scripts.bench.public recipes --only dapo-7b,kimi-k2    recipes, and what plans gain over them
"""

import sys

from scripts.bench.public import gains, steps

PARTS = {"steps": steps.BENCH, "recipes": gains.BENCH}

if __name__ == "__main__":
    if sys.argv[1:2] not in ([part] for part in PARTS):
        raise SystemExit(__doc__)
    raise SystemExit(PARTS[sys.argv[1]].main(sys.argv[2:]))
