"""The pictures of tables that notebooks show."""
