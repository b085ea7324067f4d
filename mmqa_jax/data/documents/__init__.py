"""Documents as people have them (read.READERS names their kinds): their paragraphs and figures."""
