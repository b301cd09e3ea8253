"""The plain model: a textbook page that runs on one device, reads no degree and imports no process group."""
