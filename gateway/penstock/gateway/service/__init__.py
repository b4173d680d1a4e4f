"""What routes may ask for, by subject: submit, look up, follow, cancel, erase, and facts for operators. No HTTP."""
