"""The pictures of docs/, each drawn by a program that can check it."""
