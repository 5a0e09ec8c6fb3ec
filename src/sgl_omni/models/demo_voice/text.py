"""English text to what the voice was trained on: the letters a-z, space and ``. , ? ! ' -``.

``normalise`` turns numbers, money, times, dates, units, abbreviations and acronyms into words;
``split`` cuts the result into pieces of a length that the model speaks in one go.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,?!'-"

ONES = (  # noqa: SIM905
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (10**3, "thousand"))
IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
MONTHS = "january february march april may june july august september october november december".split()  # noqa: SIM905
ABBREVIATIONS = {
    "mr": "mister",
    "mrs": "missus",
    "ms": "miz",
    "dr": "doctor",
    "prof": "professor",
    "vs": "versus",
    "etc": "et cetera",
    "st": "saint",
    "jr": "junior",
    "sr": "senior",
    "dept": "department",
    "approx": "approximately",
    "inc": "incorporated",
}
UNITS = {
    "km": "kilometers",
    "kg": "kilograms",
    "cm": "centimeters",
    "mm": "millimeters",
    "ml": "milliliters",
    "mph": "miles per hour",
    "lbs": "pounds",
    "lb": "pounds",
    "ft": "feet",
    "hz": "hertz",
    "khz": "kilohertz",
    "mhz": "megahertz",
    "ghz": "gigahertz",
    "kb": "kilobytes",
    "mb": "megabytes",
    "gb": "gigabytes",
    "tb": "terabytes",
    "ms": "milliseconds",
    "mg": "milligrams",
    "oz": "ounces",
    "hrs": "hours",
    "min": "minutes",
    "sec": "seconds",
    "am": "ay em",
    "pm": "pee em",
}
SYMBOLS = str.maketrans(
    {
        "&": " and ",
        "@": " at ",
        "+": " plus ",
        "=": " equals ",
        "#": " number ",
        "%": " percent ",
        "/": " slash ",
        "_": " ",
        "*": " ",
        "°": " degrees ",
        "€": " euros ",
        "£": " pounds ",
        "$": " dollars ",
    }
)
CURRENCIES = {"$": ("dollar", "cent", "cents"), "£": ("pound", "penny", "pence"), "€": ("euro", "cent", "cents")}

# Nobody names the scale of a longer number; it is read digit by digit. Also far below Python's limit for int().
LONGEST_NAMED_NUMBER = 300


# ---------------------------------------------------------------- numbers


def cardinal(n: int) -> str:
    """``n`` >= 0 in words: 1234 -> "one thousand two hundred thirty-four"."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    size, name = next((scale for scale in SCALES if n >= scale[0]), (100, "hundred"))
    words = f"{cardinal(n // size)} {name}"
    return f"{words} {cardinal(n % size)}" if n % size else words


def ordinal(n: int) -> str:
    """21 -> "twenty-first"."""
    words = cardinal(n)
    start = max(words.rfind(" "), words.rfind("-")) + 1
    head, last = words[:start], words[start:]
    if last in IRREGULAR_ORDINALS:
        return head + IRREGULAR_ORDINALS[last]
    return head + (last[:-1] + "ieth" if last.endswith("y") else last + "th")


def year(n: int) -> str:
    """1987 -> "nineteen eighty-seven"."""
    century, rest = divmod(n, 100)
    if 2000 <= n <= 2009 or n % 1000 == 0:
        return cardinal(n)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def digit_by_digit(digits: str) -> str:
    return " ".join(ONES[int(d)] for d in digits)


def _whole(digits: str) -> str:
    return digit_by_digit(digits) if len(digits) > LONGEST_NAMED_NUMBER else cardinal(int(digits))


def _number(match: re.Match[str]) -> str:
    whole, point, fraction = match[0].replace(",", "").partition(".")
    if point:
        return f" {_whole(whole) if whole else 'zero'} point {digit_by_digit(fraction)} "
    if len(whole) > 12 or (len(whole) > 1 and whole[0] == "0"):  # account numbers, codes
        return f" {digit_by_digit(whole)} "
    return f" {_whole(whole)} "


def _ordinal(match: re.Match[str]) -> str:
    digits = match[1]
    return digit_by_digit(digits) if len(digits) > LONGEST_NAMED_NUMBER else ordinal(int(digits))


def _money(match: re.Match[str]) -> str:
    major, minor, minors = CURRENCIES[match[1]]
    whole, fraction, scale = match[2].replace(",", ""), match[3] or "", match[4]
    if scale:
        point = f" point {digit_by_digit(fraction)}" if fraction else ""
        return f"{_whole(whole)}{point} {scale.lower()} {major}s"
    units, has_minor = int(whole[:LONGEST_NAMED_NUMBER]), any(int(d) for d in fraction)
    parts: list[str] = []
    if units or not has_minor:
        parts.append(f"{_whole(whole)} {major}{'' if units == 1 else 's'}")
    if has_minor:
        amount = int((fraction + "0")[:2])
        parts.append(f"{cardinal(amount)} {minor if amount == 1 else minors}")
    return " and ".join(parts)


def _half_of_day(letter: str) -> str:
    return "ay em" if letter in "aA" else "pee em"


def _clock(match: re.Match[str]) -> str:
    hours, minutes, half = int(match[1]), int(match[2]), match[3]
    if hours > 24 or minutes > 59:
        return f"{cardinal(hours)} {cardinal(minutes)}"
    words = cardinal(hours)
    if minutes:
        words += f" {'oh ' if minutes < 10 else ''}{cardinal(minutes)}"
    elif not half:
        words += " o'clock"
    return f"{words} {_half_of_day(half[0])}" if half else words


def _spell(letters: str) -> str:
    """Names of the letters of an acronym. A lone "a" would be read as the article."""
    return " ".join("ay" if c == "a" else c for c in letters.lower() if "a" <= c <= "z")


# ---------------------------------------------------------------- rules, applied in this order

Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]"]


def _rule(pattern: str, replacement: str | Callable[[re.Match[str]], str], flags: int = 0) -> Rule:
    return re.compile(pattern, flags), replacement


def _any(words: list[str] | dict[str, str]) -> str:
    return "|".join(words)


PUNCTUATION_RULES = (
    _rule("[\u2018\u2019`]", "'"),
    _rule(r"[“”\"«»]", " "),
    _rule(r"\s*[\u2013\u2014]\s*|\s+-+\s+|--+", ", "),
    _rule("…", ". "),
)

NUMBER_RULES = (
    _rule(r"([$£€])\s?(\d+(?:,\d{3})*)(?:\.(\d+))?(?:\s?(hundred|thousand|million|billion|trillion)\b)?", _money, re.I),
    _rule(r"\b(\d{1,2}):(\d{2})(?::\d{2})?(?:\s?([ap]\.?m\b\.?))?", _clock, re.I),
    _rule(r"\b(\d{1,2})\s?([ap])\.?m\b\.?", lambda m: f"{cardinal(int(m[1]))} {_half_of_day(m[2])}", re.I),
    _rule(
        rf"\b({_any(MONTHS)})\s+(\d{{1,2}})(?:st|nd|rd|th)?\b(?![,.]?\d)",
        lambda m: f"{m[1]} {ordinal(int(m[2]))}",
        re.I,
    ),
    _rule(r"\b(\d+)(?:st|nd|rd|th)\b", _ordinal, re.I),
    _rule(r"(?<![\w.])-(?=\d)", " minus "),
    _rule(r"\b(1[1-9]\d\d|20\d\d)s\b", lambda m: re.sub("y$", "ie", year(int(m[1]))) + "s"),
    _rule(r"(?<![\d.,])(1[1-9]\d\d|20\d\d)(?![\d,]*\d|\.\d)", lambda m: year(int(m[1]))),
    _rule(r"(\d)\s?x\s?(?=\d)", r"\1 by "),
    _rule(r"(?<=\d)-(?=\d)", " to "),
    _rule(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\d+|(?<!\w)\.\d+", _number),
    # The full stop of "5 km. away" goes with the unit; the one of "5 km. Then" ends the sentence.
    _rule(
        rf"({_any([*ONES[1:], *TENS[2:], 'hundred', 'thousand', 'million'])})\s+({_any(UNITS)})\b"
        r"(?:\.(?=\s+(?-i:[a-z])))?",
        lambda m: f"{m[1]} {UNITS[m[2].lower()]}",
        re.I,
    ),
)

ABBREVIATION_RULES = (
    _rule(r"\be\.g\.", "for example", re.I),
    _rule(r"\bi\.e\.", "that is", re.I),
    _rule(rf"\b({_any(ABBREVIATIONS)})\.(?=\s|$)", lambda m: ABBREVIATIONS[m[1].lower()], re.I),
    _rule(r"\b(Mr|Mrs|Ms|Dr)\b", lambda m: ABBREVIATIONS[m[1].lower()]),
    _rule(r"\b(?:[A-Z]\.){2,}", lambda m: f" {_spell(m[0])} "),
)

ACRONYM_RULES = (
    _rule(r"\b([A-Z]{2,5})s\b", lambda m: f"{_spell(m[1])}'s"),
    _rule(r"\b[A-Z]{2,5}\b", lambda m: _spell(m[0])),
    _rule(r"(?<!^)(?<![.?!] )\b([B-HJ-Z])\b(?!')", lambda m: _spell(m[1])),
)

CLEANUP_RULES = (
    _rule(r"[;:()\[\]{}]", ", "),
    _rule(r"[^a-z .,?!'\-]", " "),
    _rule(r"(?<![a-z])['\-]+|['\-]+(?![a-z])", " "),  # apostrophe and hyphen live inside words only
    _rule(r"['\-]{2,}", "-"),
    _rule(r"\s+", " "),
    _rule(r"\s*([.,?!])", r"\1"),
    _rule(r"[.,?!]*([?!])[.,?!]*", r"\1"),
    _rule(r"[.,]*\.[.,]*", "."),
    _rule(r",+", ","),
    _rule(r"([.,?!])(?=[a-z])", r"\1 "),
)


def _apply(rules: tuple[Rule, ...], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def normalise(text: str) -> str:
    """Speakable form of any text: lower case over ``ALPHABET``, ending in ``.``, ``?`` or ``!``.

    Empty where nothing of the text can be spoken.
    """
    text = _apply(PUNCTUATION_RULES, unicodedata.normalize("NFKC", text))
    # Where most letters are capitals, capitals do not mark acronyms.
    shouted = sum(c.isupper() for c in text) > 0.6 * max(1, sum(c.isalpha() for c in text))
    text = _apply(ABBREVIATION_RULES, _apply(NUMBER_RULES, text))
    if not shouted:
        text = _apply(ACRONYM_RULES, text)
    text = unicodedata.normalize("NFKD", text.translate(SYMBOLS))
    text = "".join(c for c in text if not unicodedata.combining(c)).lower()
    text = _apply(CLEANUP_RULES, text).strip(" ,'-").lstrip(".?! ")
    return text + "." if text and text[-1] not in ".?!" else text


# ---------------------------------------------------------------- pieces

_SENTENCE = re.compile(r"[^.?!]+[.?!]")
_EARLIEST_CUT = 40


def _cut_point(sentence: str, limit: int) -> int:
    """Where to cut a sentence that is too long: after a clause, else after a word, else anywhere."""
    for mark in (",", " "):
        at = sentence.rfind(mark, _EARLIEST_CUT, limit)
        if at >= 0:
            return at
    return limit


def split(normalised: str, limit: int = 200) -> list[str]:
    """Pieces of about ``limit`` characters at most, made of whole sentences where these fit."""
    pieces: list[str] = []
    pending = ""
    for match in _SENTENCE.finditer(normalised):
        sentence = match[0].strip()
        while len(sentence) > limit:
            if pending:
                pieces.append(pending)
                pending = ""
            cut = _cut_point(sentence, limit)
            pieces.append(sentence[:cut].rstrip(" ,") + ".")
            sentence = sentence[cut:].lstrip(" ,")
        if not sentence.strip(" .?!,"):
            continue
        if pending and len(pending) + 1 + len(sentence) > limit:
            pieces.append(pending)
            pending = sentence
        else:
            pending = f"{pending} {sentence}".strip()
    if pending:
        pieces.append(pending)
    return pieces
