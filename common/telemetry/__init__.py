"""What processes say about themselves: metrics from one list, structured logs. No prompt text in either."""
