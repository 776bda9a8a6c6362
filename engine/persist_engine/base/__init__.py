"""Room 0: the vocabulary that every other room shares. Imports no other room."""
