"""sgl-omni: a serving runtime for omni, speech and TTS models."""

__version__ = "0.1.0"
