"""Where guesses come from. Each drafter is one file and one registry row."""
