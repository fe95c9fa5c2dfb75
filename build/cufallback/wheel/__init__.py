"""Wheels: build environment, isolation, build, build log, byte-stable repack, and what a finished wheel carries."""
