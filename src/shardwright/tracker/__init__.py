"""Live bytes by kind, from the lifetimes of storages."""
