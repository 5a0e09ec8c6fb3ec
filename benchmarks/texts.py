"""Texts of one length, no two alike, a line each, for models of random weights, which take a letter for a token.

An engine that knows a prompt does not compute it again, so a measurement of new requests wants texts that are new.

    python -m benchmarks.texts --letters 151 --count 6000 --out /tmp/texts.txt
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

WORDS = """
the of and to in is it that was for on are with as be at one have this from by hot word but what some we can out other
were all there when up use your how said an each she river window table garden morning letter
"""


def texts(letters: int, count: int, seed: int) -> list[str]:
    """``count`` sentences of so many letters."""
    rng, words = random.Random(seed), WORDS.split()
    found: dict[str, None] = {}
    while len(found) < count:
        sentence = ""
        while len(sentence) < letters:
            sentence += f"{rng.choice(words)} "
        found[f"{sentence[: letters - 1].rstrip():.<{letters}}"] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--letters", type=int, default=151)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text("".join(f"{text}\n" for text in texts(options.letters, options.count, options.seed)))


if __name__ == "__main__":
    main()
