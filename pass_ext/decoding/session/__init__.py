"""The keys and values of one batch, and the model's calls that extend them."""
