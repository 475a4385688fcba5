"""Programs that write parts of docs/ and check them."""
