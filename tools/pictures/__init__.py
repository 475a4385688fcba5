"""Draws the pictures of docs/ and checks them."""
