"""`equipoise view`: a local web page of runs, their metrics and their load traces."""
