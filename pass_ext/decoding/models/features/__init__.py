"""What some transformers models have beside plain layers, a file or two each; ``table.py`` lists them."""
