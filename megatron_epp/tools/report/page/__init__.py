"""A page of plans and runs to explore in a browser: its data (`data`), and the file with its style and scripts (`html`)."""
