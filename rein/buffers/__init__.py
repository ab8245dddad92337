"""What keeps transitions; one file for each way of keeping them."""
