"""The page of `ringattn play`: plans and advice that answer while one changes the settings."""
