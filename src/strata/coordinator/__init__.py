"""The coordinator: who is here, what is theirs, and what has been agreed on."""
