"""What a person looks at: the live view, summaries, comparisons of runs."""
