"""Executes a Plan: messages, channels, workers, the coordinator and the supervisor."""
