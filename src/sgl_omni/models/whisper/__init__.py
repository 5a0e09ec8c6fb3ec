"""Whisper: an encoder of audio and a decoder that attends over it."""
