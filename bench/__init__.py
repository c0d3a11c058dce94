"""Measurements on real servers; each module is a command. Nothing here asserts a speed."""
