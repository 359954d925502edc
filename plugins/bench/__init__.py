"""What `modelrunner bench` measures (`scenarios`), with which engines (`engines`), and how it is told (`report`, `chart`)."""
