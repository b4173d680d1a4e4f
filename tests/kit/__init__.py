"""Test helpers that several folders share. One module for each area."""
