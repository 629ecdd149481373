"""What several roles share. Imports nothing else of ours."""
