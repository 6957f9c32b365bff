"""What several test folders share; tests/conftest.py puts the folder above on sys.path."""
