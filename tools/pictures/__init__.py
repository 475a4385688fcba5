"""Programs that draw the pictures of docs/ and check them."""
