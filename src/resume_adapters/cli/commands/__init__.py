"""The commands, one module each. Importing a module registers its command with the app."""
