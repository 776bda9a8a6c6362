"""List-append histories on real servers."""
