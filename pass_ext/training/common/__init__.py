"""The skeleton of the three training commands."""
