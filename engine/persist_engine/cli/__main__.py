"""`python -m persist_engine.cli`."""

from persist_engine.cli.main import main

if __name__ == "__main__":
    main()
