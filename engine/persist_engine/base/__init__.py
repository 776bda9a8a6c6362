"""The vocabulary that every other room shares. Imports no other room."""
