"""Languages that MOSS-TTS-Local v1.5 was trained to be told of: by name and by code, as its model card has them."""

from __future__ import annotations

_CODES = {
    "ar": "Arabic",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "hu": "Hungarian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sv": "Swedish",
    "sw": "Swahili",
    "th": "Thai",
    "tl": "Tagalog",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}

LANGUAGES: dict[str, str] = _CODES | {name.casefold(): name for name in _CODES.values()}
"""Name or code, in lower case -> the name that the prompt says."""

CHOICES: tuple[str, ...] = (*sorted(_CODES.values()), *_CODES)
"""What a request may say."""
